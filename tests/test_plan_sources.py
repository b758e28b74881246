"""Configurations that are already in use, read as they are found in the field."""

import copy
import json
import subprocess
import sys

import pytest

from zerostage.mistakes import InputError
from zerostage.planning.inputs import sources
from zerostage.planning.run import Run

ZERO3 = """{
  "_comment": "as on the cluster",
  "train_batch_size": 256,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "steps_per_print": 50,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "optimizer": {"type": "FusedAdam", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
  "communication_data_type": "fp32",
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 2e8,
    "allgather_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "stage3_prefetch_bucket_size": 50000000,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "zero_hpz_partition_size": 8,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "none"}
  }
}
"""
AUTO = """{
  "fp16": {"enabled": "auto", "loss_scale": 0},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": "auto",
    "allgather_bucket_size": 2e8,
    "overlap_comm": false,
    "offload_optimizer": {"device": "cpu"}
  },
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto"
}
"""
FSDP1 = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 4
num_processes: 32
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""
FSDP2 = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_offload_params: true
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
mixed_precision: no
num_machines: 1
num_processes: 8
dynamo_config:
  dynamo_backend: INDUCTOR
"""
DEEPSPEED = """distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 16
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: fp16
num_machines: 2
num_processes: 16
"""
POINTING = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: configs/zero2.json
  zero3_init_flag: false
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
TITAN = """# 128 cards
[job]
description = "70B"
[model]
name = "llama3"
flavor = "70B"
tokenizer_path = "./assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 1.5e-4
implementation = "foreach"
[training]
local_batch_size = 4
global_batch_size = 512
seq_len = 8192
max_norm = 1.0
steps = 1000
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
fsdp_reshard_after_forward = "default"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
[checkpoint]
interval = 500
"""
OLD_TITAN = """[model]
name = "llama2"
flavor = "7B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
fused = false
[training]
batch_size = 8
seq_len = 2048
data_parallel_degree = -1
tensor_parallel_degree = 1
compile = false
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'
"""
TRAINER = """{
  "model_name_or_path": "Qwen/Qwen3-8B",
  "output_dir": "out",
  "learning_rate": 1e-5,
  "bf16": true,
  "per_device_train_batch_size": 2,
  "gradient_accumulation_steps": 8,
  "optim": "paged_adamw_8bit",
  "use_liger_kernel": true,
  "max_length": 4096,
  "fsdp": "full_shard auto_wrap",
  "fsdp_config": {
    "fsdp_version": 1,
    "backward_prefetch": "backward_pre",
    "forward_prefetch": "false",
    "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
    "use_orig_params": "true",
    "activation_checkpointing": true
  }
}
"""


@pytest.fixture
def given(tmp_path):
    def read(text, name="c.json", **more):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        found = sources.read(path, **more)
        Run(**found.run)  # every field is one of a run, with a value that it takes
        return found

    return read


def test_deepspeed(given):
    found = given(ZERO3)
    assert found.kind == "DeepSpeed JSON"
    assert found.run == {
        "engine": "deepspeed",
        "micro_batch": 2,
        "accumulation": 4,
        "weights": "bf16",
        "master": "fp32",
        "fp32_reduce": True,
        "optimizer": "adamw",
        "offload": "optimizer",
    }
    assert (found.stage, found.ranks, found.weights_shard, found.shard) == (3, 32, 8, None)  # 256 / (2 x 4) ranks
    assert found.engine_options == {
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 500_000_000,
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "zero_hpz_partition_size": 8,
    }
    assert found.assumed == found.ignored == ()


def test_deepspeed_auto(given):
    found = given(AUTO)
    assert found.run == {"engine": "deepspeed", "optimizer": "adamw", "offload": "optimizer"}
    assert (found.stage, found.ranks) == (2, None)
    assert found.engine_options == {"allgather_bucket_size": 200_000_000, "overlap_comm": False}
    assert found.auto == ("reduce_bucket_size",)
    assert found.options(4096) == {**found.engine_options, "reduce_bucket_size": 4096 * 4096}
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "bf16.enabled",
        "fp16.enabled",
    ):
        assert any(line.startswith(f"{key} is 'auto'") for line in found.assumed), key


def test_deepspeed_auto_sizes_follow_from_the_model(given):
    """The figures that transformers puts in place of 'auto' for a hidden size of 3,584 (Qwen2.5-7B)."""
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = ", ".join(f'"{key}": "auto"' for key in keys)
    found = given(f'{{"zero_optimization": {{"stage": 3, {zero}}}}}')
    assert found.options(3584) == dict(zip(keys, (12_845_056, 11_560_550, 35_840)))


def test_deepspeed_in_fp32_and_in_16_bits_throughout(given):
    assert given('{"train_batch_size": 8}').run == {"engine": "deepspeed", "accumulation": 1, "weights": "fp32", "master": "none"}
    found = given(
        '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}, '
        '"zero_optimization": {"stage": 1}}'
    )
    assert found.run == {"engine": "deepspeed", "weights": "bf16", "master": "bf16", "gradients": "bf16", "moments": "bf16"}
    found = given('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}')
    assert (found.run["weights"], found.shard) == ("fp16", 4)


def test_batches_complete_one_another(given):
    for text, run in (
        ('{"train_batch_size": 64}', {"micro_batch": 8, "accumulation": 1}),
        ('{"train_batch_size": 64, "gradient_accumulation_steps": 2}', {"micro_batch": 4, "accumulation": 2}),
        ('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1}', {"micro_batch": 1, "accumulation": 8}),
        ('{"train_micro_batch_size_per_gpu": 3}', {"micro_batch": 3, "accumulation": 1}),
    ):
        found = given(text, ranks=8)
        assert {key: found.run[key] for key in ("micro_batch", "accumulation")} == run
        assert found.ranks == 8


def test_what_is_not_modelled_is_told(given):
    found = given(
        '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true, "reduce_bucket_sise": 5, "offload_param": '
        '{"device": "nvme", "nvme_path": "/fast"}, "offload_optimizer": {"device": "nvme", "ratio": 0.5}}, '
        '"optimizer": {"type": "Muon"}, "activation_checkpointing": {"partition_activations": true, "profile": false}, '
        '"wall_clock_breakdown": true, "sequence_parallel_size": 4}'
    )
    told = "\n".join(found.ignored)
    for words in (
        "zero_optimization.zero_quantized_weights = True: traffic is counted in 16 bits",
        "zero_optimization.reduce_bucket_sise: not known; did you mean reduce_bucket_size?",
        "offload to nvme: planned as offload to CPU memory",
        "offload_optimizer.ratio = 0.5",
        "optimizer.type is 'Muon'",
        "activation_checkpointing.partition_activations = True",
        "sequence_parallel_size = 4",
    ):
        assert words in told
    assert len(found.ignored) == 7
    assert found.run["offload"] == "optimizer+weights"
    assert "optimizer" not in found.run


def test_accelerate_fsdp1(given):
    found = given(FSDP1, "c.yaml")
    assert found.kind == "accelerate configuration"
    assert found.run == {"engine": "fsdp1", "weights": "bf16", "master": "fp32", "fp32_reduce": False, "checkpointing": "full"}
    assert (found.stage, found.ranks, found.nodes, found.shard, found.replicate) == (3, 32, 4, 8, 4)
    assert found.ignored == ()
    assert found.assumed == ("fsdp_config.fsdp_version is not given: 1",)


def test_accelerate_fsdp2(given):
    found = given(FSDP2, "c.yml")
    assert found.run == {
        "engine": "fsdp2",
        "weights": "fp32",
        "master": "none",
        "offload": "optimizer+weights",
        "checkpointing": "none",
        "fused_kernels": True,
    }
    assert (found.stage, found.ranks, found.nodes, found.shard) == (2, 8, 1, None)
    assert len(found.assumed) == 2 and "unless the script itself" in found.assumed[1]
    assert given(FSDP2.replace("forward: false", "forward: true"), "c.yml").stage == 3


@pytest.mark.parametrize(
    "strategy, stage, shard",
    [
        ("FULL_SHARD", 3, None),
        ("1", 3, None),
        ("SHARD_GRAD_OP", 2, None),
        ("NO_SHARD", 0, None),
        ("hybrid_shard_zero2", 2, 8),
        ("4", 3, 8),
    ],
)
def test_sharding_strategies(given, strategy, stage, shard):
    found = given(FSDP1.replace("HYBRID_SHARD", strategy), "c.yaml")
    assert (found.stage, found.shard) == (stage, shard)
    # newer versions of accelerate write it under this name
    found = given(FSDP1.replace("fsdp_sharding_strategy: HYBRID_SHARD", f"fsdp_reshard_after_forward: {strategy}"), "c.yaml")
    assert (found.stage, found.shard) == (stage, shard)


def test_accelerate_deepspeed(given):
    found = given(DEEPSPEED, "c.yaml")
    assert found.run == {
        "engine": "deepspeed",
        "weights": "fp16",
        "master": "fp32",
        "accumulation": 16,
        "offload": "optimizer+weights",
    }
    assert (found.stage, found.ranks, found.nodes) == (3, 16, 2)
    assert found.assumed == found.ignored == ()


def test_accelerate_points_to_a_deepspeed_file(given, tmp_path):
    given(AUTO, "configs/zero2.json")
    found = given(POINTING, "c.yaml")
    assert found.kind == "accelerate configuration"
    assert found.run["weights"] == "bf16"  # 'auto' there, said here
    assert found.run["offload"] == "optimizer"
    assert (found.stage, found.ranks) == (2, 8)
    assert not any("bf16" in line for line in found.assumed)
    pointed = tmp_path / "configs" / "zero2.json"
    pointed.write_text(AUTO.replace('"stage": 2', '"stage": 5'))
    with pytest.raises(InputError, match="configs/zero2.json: zero_optimization.stage is 5"):
        given(POINTING, "c.yaml")
    pointed.write_text(
        AUTO.replace('"train_batch_size": "auto"', '"train_batch_size": 100').replace('steps": "auto"', 'steps": 3')
    )
    with pytest.raises(InputError, match="train_batch_size is 100, but accumulation 3 x data-parallel ranks 8 = 24"):
        given(POINTING, "c.yaml")
    with pytest.raises(InputError, match="there is no file .*zero3.json"):
        given(POINTING.replace("zero2", "zero3"), "c.yaml")


def test_accelerate_ddp_and_more_degrees(given):
    found = given(
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n", "c.yaml"
    )
    assert (found.stage, found.run["engine"], found.ranks) == (0, "ddp", 4)
    assert found.ignored == ("fsdp_config: distributed_type is MULTI_GPU, so accelerate does not read it",)
    degrees = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
    found = given(FSDP2 + degrees + "  parallelism_config_tp_size: 2\n", "c.yaml")
    assert (found.shard, found.replicate, found.run["tensor"]) == (2, 2, 2)
    with pytest.raises(InputError, match="dp_replicate_size 2 x dp_shard_size 2 = 4, but there are 8 ranks"):
        given(FSDP2 + degrees, "c.yaml")


def test_torchtitan(given):
    found = given(TITAN, "c.toml")
    assert found.kind == "torchtitan TOML"
    assert found.run == {
        "engine": "fsdp2",
        "implementation": "torchtitan",
        "micro_batch": 4,
        "accumulation": 8,  # 512 / (4 x 16)
        "sequence": 8192,
        "weights": "bf16",
        "master": "fp32",
        "fp32_reduce": True,
        "checkpointing": "full",
        "optimizer": "adamw",
        "optimizer_kernel": "foreach",
        "fused_kernels": True,
        "tensor": 8,
    }
    assert (found.stage, found.shard, found.replicate, found.ranks, found.model) == (3, 8, 2, 128, "llama-3.1-70b")
    assert found.assumed == found.ignored == ()
    assert given(TITAN.replace('"default"', '"never"'), "c.toml").stage == 2


def test_torchtitan_of_old(given):
    found = given(OLD_TITAN, "c.toml")
    assert (found.run["micro_batch"], found.run["sequence"], found.run["checkpointing"]) == (8, 2048, "selective")
    assert (found.run["optimizer_kernel"], found.run["fused_kernels"]) == ("foreach", False)
    assert (found.stage, found.ranks, found.model) == (3, None, "llama-2-7b")
    assert found.ignored == ()
    found = given(OLD_TITAN.replace("'op'", "'2'"), "c.toml")
    assert found.ignored == ("activation_checkpoint.selective_ac_option is not 'op' but every layer of 2: planned as 'op'",)
    found = given(
        "[training]\nlocal_batch_size = 1\n[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n",
        "c.toml",
    )
    assert (found.stage, found.run["engine"], found.ranks) == (0, "ddp", 8)
    assert any("seq_len is not given: 2048" in line for line in found.assumed)


def test_trainer(given):
    found = given(TRAINER)
    assert found.kind == "Trainer arguments"
    assert found.run == {
        "engine": "fsdp1",
        "micro_batch": 2,
        "accumulation": 8,
        "sequence": 4096,
        "weights": "bf16",
        "master": "fp32",
        "fp32_reduce": False,
        "optimizer": "adamw",
        "moments": "int8",
        "checkpointing": "full",
        "fused_kernels": True,
        "loss": "chunked",
    }
    assert (found.stage, found.model) == (3, "Qwen/Qwen3-8B")
    assert found.assumed == found.ignored == ()


def test_trainer_in_other_forms(given):
    found = given('{"fsdp": ["shard_grad_op", "offload"], "fsdp_config": {}}')
    assert (found.stage, found.run["engine"], found.run["offload"]) == (2, "fsdp2", "optimizer+weights")
    found = given('{"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {"xla": false}}')
    assert (found.stage, found.run["engine"], found.shard) == (3, "fsdp1", None)
    assert any("divided within a node" in line for line in found.assumed)
    found = given('{"fsdp": true, "fsdp_config": {"version": 2, "reshard_after_forward": false}}')
    assert (found.stage, found.run["engine"]) == (2, "fsdp2")
    found = given(
        '{"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_reshard_after_forward": true, "fsdp_version": 2}'
    )
    assert (found.stage, found.run["engine"]) == (3, "fsdp2")
    found = given('{"deepspeed": ' + AUTO + ', "bf16": true, "per_device_train_batch_size": 4, "gradient_checkpointing": true}')
    assert (found.stage, found.run["engine"], found.run["weights"], found.run["checkpointing"]) == (
        2,
        "deepspeed",
        "bf16",
        "full",
    )
    found = given('{"per_device_train_batch_size": 4, "fp16": true}')
    assert (found.stage, found.run["engine"], found.run["weights"]) == (0, "ddp", "fp16")


@pytest.mark.parametrize(
    "text, name, words",
    [
        ('{"zero_optimization": {"stage": 5}}', "c.json", "zero_optimization.stage is 5; there are stages 0, 1, 2 and 3"),
        ('{"zero_optimization": {"stage": "two"}}', "c.json", "zero_optimization.stage is 'two'; it must be a whole number"),
        ('{"zero_optimization": {"stage": true}}', "c.json", "zero_optimization.stage is True; it must be a whole number"),
        ('{"zero_optimization": 3}', "c.json", "zero_optimization is 3; it must be a table"),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "c.json", "bf16.enabled and fp16.enabled are both true"),
        ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "c.json", "offload_param is cpu at stage 2"),
        ('{"zero_optimization": {"stage": 2, "mics_shard_size": 8}}', "c.json", "mics_shard_size is 8 at stage 2"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "cp"}}}', "c.json", "'cp', not one of .*; did you mean cpu?"),
        ('{"train_micro_batch_size_per_gpu": 0}', "c.json", "it must be a whole number of 1 or more"),
        ('{"train_micro_batch_size_per_gpu": 1.5}', "c.json", "it must be a whole number of 1 or more"),
        ('{"train_batch_size": 1e999}', "c.json", "it must be a whole number of 1 or more"),
        ('{"zero_optimization": {"stage": 1,}}', "c.json", "is not JSON: line 1, column 3"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "c.json", "gives train_batch_size twice"),
        ("[1, 2]", "c.json", "holds no table of keys and values"),
        ("", "c.yaml", "holds nothing"),
        ("a: [1, 2\nb: 3\n", "c.yaml", "is not YAML: line 2, column 2"),
        ("[training\nx = 1\n", "c.toml", "is not TOML: .*line 1"),
        ('{"zero_optimisation": {"stage": 3}}', "c.json", "it has zero_optimisation; did you mean zero_optimization"),
        ("learning_rate: 3\n", "c.yaml", "looked for one of these keys: accelerate configuration: distributed_type"),
        (FSDP1.replace("HYBRID_SHARD", "FULL_SHRAD"), "c.yaml", "'full_shrad', not one of .*; did you mean full_shard?"),
        (FSDP1.replace("HYBRID_SHARD", "6"), "c.yaml", "fsdp_config.fsdp_sharding_strategy is '6', not one of"),
        (FSDP1.replace("num_processes: 32", "num_processes: 30"), "c.yaml", "num_processes is 30 on num_machines 4"),
        (FSDP1.replace("type: FSDP", "type: FSPD"), "c.yaml", "distributed_type is 'FSPD', not one of .*; did you mean fsdp?"),
        (FSDP1.replace("sharding_strategy: HYBRID_SHARD", "reshard_after_forward: true"), "c.yaml", "is true, which is FSDP2's"),
        (FSDP2.replace("forward: false", "forward: HYBRID_SHARD"), "c.yaml", "is hybrid_shard, which only FSDP1 has"),
        (FSDP2.replace("version: 2", "version: 3"), "c.yaml", "fsdp_config.fsdp_version is 3"),
        (DEEPSPEED.replace("zero_stage: 3", "zero_stage: 4"), "c.yaml", "deepspeed_config.zero_stage is 4"),
        (TITAN.replace("= 512", "= 500"), "c.toml", "global_batch_size is 500, but micro-batch 4 x data-parallel ranks 16 = 64"),
        (TITAN.replace('mode = "full"', 'mode = "ful"'), "c.toml", "'ful', not one of none, .*; did you mean full?"),
        ('{"fsdp": "full_shard autowrap"}', "c.json", "fsdp is 'autowrap', not one of .*; did you mean auto_wrap?"),
        ('{"fsdp": "full_shard", "deepspeed": {}, "bf16": true, "fp16": true}', "c.json", "bf16 and fp16 are both true"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(given, text, name, words):
    with pytest.raises(InputError, match=words) as told:
        given(text, name)
    assert "\n" not in str(told.value)
    assert "c." in str(told.value)


def test_contradicting_batches(given):
    with pytest.raises(InputError) as told:
        given(ZERO3, ranks=16)
    assert str(told.value).endswith(
        "train_batch_size is 256, but micro-batch 2 x accumulation 4 x data-parallel ranks 16 = 128; "
        "change one of them so that they agree"
    )
    with pytest.raises(InputError, match="train_batch_size is 12, but micro-batch 5 x accumulation 1"):
        given('{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 1}')


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        sources.read(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        sources.read(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read: it is not text"):
        sources.read(tmp_path / "b.json")


def test_no_torch_is_needed(tmp_path):
    (tmp_path / "c.yaml").write_text(FSDP1)
    script = "import sys; from zerostage.planning.inputs.sources import read; read(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "c.yaml")]).returncode == 0


def test_no_value_ends_in_a_traceback(given, tmp_path):
    """Every value of several files replaced by values of other types: read, or told in one line."""

    def places(table, before=()):
        for key, value in table.items():
            yield (*before, key)
            if isinstance(value, dict):
                yield from places(value, (*before, key))

    told = 0
    tables = [json.loads(ZERO3), json.loads(TRAINER), {"fsdp": True, "deepspeed": {}}]
    for text, name in ((FSDP1, "a.yaml"), (DEEPSPEED, "b.yaml"), (TITAN, "c.toml")):
        (tmp_path / name).write_text(text)
        tables.append(sources.load(tmp_path / name))
    for table in tables:
        for place in places(table):
            for value in (None, True, -1, 1.5, "words", "auto", [1], {"a": 1}):
                changed = copy.deepcopy(table)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                try:
                    given(json.dumps(changed))
                except InputError as error:
                    assert "\n" not in str(error)
                    told += 1
    assert told > 200
