"""Files to packed sequences, and the order in which a step takes them."""

import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostage.mistakes import InputError
from zerostage.train import data
from zerostage.train.config import TrainConfig

END = 1


class Words:
    """A tokenizer of whitespace-separated numbers, with the two members that `data` uses."""

    eos_token_id = END

    def __call__(self, text, **_):
        return {"input_ids": [int(word) for word in text.split()]}


def config(**fields):
    return TrainConfig(**{"model": "m", "data": ["d"], "sequence_length": 4, "eval_fraction": 0, **fields})


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_three_kinds_of_file_give_the_same_tokens(tmp_path):
    texts = ["10 11 12", "13", "14 15"]
    lines = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts), "")
    table = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": texts}), table)
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(files, texts):
        file.write_text(text, encoding="utf-8")
    expected = [10, 11, 12, END, 13, END, 14, 15, END]
    for paths in ([lines], [table], [str(file) for file in files]):
        assert data.tokenize(paths, Words()).tolist() == expected


@given(st.integers(0, 60), st.integers(1, 9))
def test_every_token_but_the_first_is_a_target_once(count, length):
    samples = data.Samples(np.arange(100, 100 + count, dtype=np.int32), length)
    inputs, labels = samples.batch(range(len(samples)))
    assert inputs.shape == labels.shape == (len(samples), length)
    valid = labels != data.IGNORED
    assert labels[valid].tolist() == list(range(101, 100 + count))
    assert (inputs[valid] + 1 == labels[valid]).all()
    if len(samples):
        assert valid.any(axis=1).all()  # no sequence is without a target


def test_an_index_of_minus_one_is_a_row_without_targets():
    inputs, labels = data.Samples(np.arange(20, dtype=np.int32), 4).batch([-1, 0])
    assert (labels[0] == data.IGNORED).all() and (inputs[0] == 0).all()
    assert labels[1].tolist() == [1, 2, 3, 4]


def taken(samples, batches, seed=7, start=data.Position()):
    """The indices of global batches of these sizes one after the other, and the position after them."""
    found = []
    for size in batches:
        indices, start = data.take(samples, size, start, seed)
        found.append(indices.tolist())
    return found, start


@given(st.integers(1, 50), st.sampled_from([1, 2, 3]), st.integers(0, 5))
def test_the_order_is_the_same_for_every_number_of_ranks(samples, micro_batch, seed):
    total = 12 * micro_batch
    samples += total
    for indices in taken(samples, [total] * (2 * (samples // total)), seed)[0]:
        for ranks in (1, 2, 3, 4, 12):
            parts = [data.rank_share(np.array(indices), rank, ranks, micro_batch) for rank in range(ranks)]
            assert all(len(batch) == micro_batch for part in parts for batch in part)
            assert np.concatenate([batch for part in parts for batch in part]).tolist() == indices


def test_an_epoch_sees_each_sample_once_and_epochs_differ():
    batches, end = taken(22, [4] * 10)
    epochs = [sum(batches[:5], []), sum(batches[5:], [])]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] and end == (1, 20)
    assert (batches, end) == taken(22, [4] * 10)
    assert batches != taken(22, [4] * 10, seed=8)[0]


@given(st.integers(1, 60), st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_H15_whatever_the_global_batch_becomes_no_sample_of_an_epoch_comes_twice_or_is_lost(samples, sizes):
    samples += max(sizes)
    position, seen = data.Position(), []
    for size in sizes:
        indices, after = data.take(samples, size, position, 3)
        if after.epoch > position.epoch:
            assert samples - position.offset < size  # only a short last batch is dropped
            seen = []
        seen += indices.tolist()
        assert len(seen) == len(set(seen)) == after.offset
        assert seen == np.random.default_rng([3, after.epoch]).permutation(samples)[: after.offset].tolist()
        position = after


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 3.25]), st.integers(0, 9))
def test_the_steps_that_are_left_are_those_to_the_end_of_the_epochs(samples, first, later, epochs, done):
    samples += max(first, later)
    fresh = data.steps_left(samples, first, data.Position(), epochs)
    assert fresh == math.ceil(epochs * (samples // first))
    done = min(done, fresh)
    _, position = taken(samples, [first] * done)
    assert data.steps_left(samples, first, position, epochs) == fresh - done
    if epochs == int(epochs):
        left = data.steps_left(samples, later, position, epochs)
        assert taken(samples, [later] * left, start=position)[1].epoch < epochs
        assert taken(samples, [later] * (left + 1), start=position)[1].epoch == epochs


def test_the_held_out_part_is_the_end_or_files_of_its_own(tmp_path):
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text(" ".join(str(i) for i in range(10, 109)))
    other.write_text(" ".join(str(i) for i in range(200, 220)))
    train, held_out = data.load(config(data=[str(path)], eval_fraction=0.2), Words())
    assert (len(train.tokens), len(held_out.tokens)) == (80, 20)
    assert held_out.tokens[0] == 90
    train, held_out = data.load(config(data=[str(path)], eval_data=[str(other)], eval_samples=2), Words())
    assert len(train.tokens) == 100 and len(held_out) == 2
    assert data.load(config(data=[str(path)]), Words())[1] is None


def test_too_little_data_for_one_global_batch(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("10 11 12 13 14 15 16 17 18")
    with pytest.raises(InputError, match="gives 3 sequences of 4 tokens, but one global batch needs 8: lower"):
        data.load(config(data=[str(path)], global_batch=8), Words())


def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path):
    def fails(path, *parts):
        with pytest.raises(InputError) as caught:
            data.tokenize([str(path)], Words())
        assert "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value)

    fails(tmp_path / "none.txt", "none.txt", "does not exist")
    (tmp_path / "empty.txt").write_text("")
    fails(tmp_path / "empty.txt", "empty.txt is empty")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 1")
    fails(tmp_path / "latin.txt", "not UTF-8", "byte 3")
    fails(jsonl(tmp_path / "bad.jsonl", {"text": "1"}, "{oops"), "bad.jsonl:2", "not JSON")
    fails(jsonl(tmp_path / "field.jsonl", {"text": "1"}, "", {"body": "2"}), "field.jsonl:3", "'text'")
    fails(jsonl(tmp_path / "blank.jsonl", "", ""), "no document")
    (tmp_path / "fake.parquet").write_text("not a table")
    fails(tmp_path / "fake.parquet", "fake.parquet is not a Parquet file")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["1"]}), tmp_path / "column.parquet")
    fails(tmp_path / "column.parquet", "no 'text' column", "body")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["1", None]}), tmp_path / "null.parquet")
    fails(tmp_path / "null.parquet", "None, not a string")
