"""Engines of DeepSpeed that train a small model, each with a checkpoint of its own, and what they had in it."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from models import features
from torch import nn

BF16 = {"bf16": {"enabled": True}}
WIDE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}  # at stage 1 another class of optimizer, BF16_Optimizer
CASES = {
    "stage 1": (BF16, {"stage": 1}),
    "stage 2": (BF16, {"stage": 2}),
    "round robin": (BF16, {"stage": 2, "round_robin_gradients": True}),
    "stage 3": (BF16, {"stage": 3, "sub_group_size": 100}),
    "fp32 gradients": (WIDE, {"stage": 1}),
    "fp32 stage 2": ({}, {"stage": 2}),
    "fp32 stage 3": ({}, {"stage": 3}),
    "fp32 elastic": ({}, {"stage": 2, "elastic_checkpoint": True}),
    "fp32 stage 0": ({}, {"stage": 0}),
}
READ = [name for name in CASES if name != "fp32 stage 0"]
UNIVERSAL = ["stage 2", "stage 3", "fp32 gradients"]
CONVERTED = [*UNIVERSAL, "round robin"]
STATES = ("exp_avg", "exp_avg_sq")
RAN = []


def ran():
    RAN.append(True)


class Code:
    """An object that runs something when it is made from a file."""

    def __reduce__(self):
        return ran, ()


class Model(nn.Module):
    """Odd sizes, one weight of two modules, a frozen one, buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fixed = nn.Linear(7, 13), nn.Linear(13, 13, bias=False)
        self.fixed.requires_grad_(False)
        self.middle, self.again, self.last = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 5)
        self.again.weight = self.middle.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        x = self.fixed(torch.tanh(self.first(x))) * self.scale.to(x.dtype)
        return self.last(self.again(torch.tanh(self.middle(x))))


def optimizer_of(model):
    """Matrices with weight decay and vectors without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def step(engine, rank, number, dtype):
    x, y = features(rank, number, inputs=7, outputs=5)
    loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
    engine.backward(loss)
    engine.step()


def engines(rank, n, folder):
    """Run all engines and save them under `folder`; what rank 0 sees of each: name -> term -> parameter -> value."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile collectives of its own
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    seen = {}
    for name, (precision, zero) in CASES.items():
        model = Model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**zero, "reduce_bucket_size": 1000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**6,
            "gradient_clipping": 0.0,
            **precision,
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
        dtype = torch.bfloat16 if precision else torch.float32
        for number in range(3):
            step(engine, rank, number, dtype)
        state = {"seen": {"by": [1, 2]}, "run": Code(), "method": [].append, "some": collections.defaultdict(list, a=[1])}
        engine.save_checkpoint(f"{folder}/{name}", client_state=state)
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        found = seen[name] = {"shapes": {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}}
        if zero["stage"]:
            if zero["stage"] < 3:  # DeepSpeed looks them up after the first group's first step, when the second has none
                engine.optimizer._hp_optimizer_states_linked = False
                engine.optimizer._lazy_init_hp_params_optimizer_state()
            found["master"] = {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
            for key in STATES:
                found[key] = {name: safe_get_full_optimizer_state(p, key).clone() for name, p in trained.items()}
        if zero["stage"] and precision is not WIDE and rank == 0:  # whose files the script does not read
            values = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}")
            found["script"] = {name: value.clone() for name, value in values.items()}
        if name in CONVERTED and rank == 0:
            convert(Path(folder, name, "global_step3"))
        if not precision and zero["stage"]:
            for number in range(3, 6):
                step(engine, rank, number, dtype)
            found["on"] = {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
        engine.destroy()
    return seen if rank == 0 else None


def convert(folder):
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder), output_folder=f"{folder}_universal", num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )  # fmt: skip
    )
