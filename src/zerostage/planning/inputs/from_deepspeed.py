"""A DeepSpeed JSON as a `Given`. Keys and defaults: deepspeed/runtime/config.py and deepspeed/runtime/zero/config.py."""

from __future__ import annotations

from typing import Any

from zerostage.planning.inputs.given import AUTO, DTYPES, Draft, Section

#: Sizes (elements, or ranks) and switches of `zero_optimization` that decide buffers and messages.
SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
)
SWITCHES = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients")

#: Of the whole file and of `zero_optimization`: what says nothing about memory or the time of a step.
HARMLESS = (
    "scheduler steps_per_print wall_clock_breakdown gradient_clipping zero_allow_untested_optimizer dump_state tensorboard wandb "
    "csv_monitor comet flops_profiler comms_logger comms_config monitor_config checkpoint data_efficiency "
    "zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor memory_breakdown "
    "use_data_before_expert_parallelism seed autotuning aio nebula dataloader_drop_last load_universal_checkpoint "
    "elasticity graph_harvesting"
).split()
HARMLESS_SCALING = (
    "loss_scale loss_scale_window initial_scale_power hysteresis min_loss_scale consecutive_hysteresis type "
    "immediate_grad_update check_grad_overflow"
).split()
HARMLESS_ZERO = (
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save load_from_fp32_weights "
    "elastic_checkpoint ignore_unused_parameters log_trace_cache_warnings enable_sanity_checks pipeline_loading_checkpoint "
    "override_module_apply mics_hierarchical_params_gather use_multi_rank_bucket_allreduce memory_efficient_linear "
    "stage3_module_granularity_threshold stage3_partition_stream_chunk_size leaf_module legacy_stage1 allgather_size "
    "zero_init zero_quantized_nontrainable_weights"
).split()


def fill(draft: Draft, table: dict[str, Any], weights: str | None = None, ranks: int | None = None) -> None:
    """Read the whole file `table` into `draft`.

    `weights` is the precision that a program around DeepSpeed sets where the file leaves it 'auto' or out; `ranks` is
    how many it starts. Raises InputError for values that contradict one another.
    """
    top = Section(draft, table)
    draft.state_run(
        engine="deepspeed",
        micro_batch=top.whole("train_micro_batch_size_per_gpu"),
        accumulation=top.whole("gradient_accumulation_steps"),
    )
    total = top.whole("train_batch_size")
    alone = (total is None) == ("micro_batch" in draft.run)  # one of the two without the other
    if alone and "gradient_accumulation_steps" not in table and "accumulation" not in draft.run:
        draft.state_run(accumulation=1)
        draft.assumed.append("gradient_accumulation_steps is not given: 1, DeepSpeed's default")
    draft.state(ranks=ranks)
    _precision(draft, top, weights)
    _optimizer(draft, top)
    _zero(draft, top.section("zero_optimization"))
    checkpointing = top.section("activation_checkpointing")
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        checkpointing.ignore(key, (False,), "counted as plain checkpointing, whole and on the card")
    checkpointing.rest(("number_checkpoints", "synchronize_checkpoint_boundary", "profile"))
    tensor = top.section("tensor_parallel")
    draft.state_run(tensor=tensor.whole("autotp_size", unset=(0,)))
    tensor.rest(("tp_overlap_comm", "tp_grain_size", "preset_model", "tensor_parallel"))
    for key, why in (
        ("sequence_parallel_size", "sequences are counted whole on each rank"),
        ("compression_training", "weights are counted uncompressed"),
        ("sparse_attention", "planned as dense attention"),
        ("sparse_gradients", "planned as dense gradients"),
        ("amp", "planned by bf16 and fp16 alone"),
        ("torch_autocast", "planned by bf16 and fp16 alone"),
        ("compile", "planned without compilation"),
        ("zenflow", "planned without"),
        ("pipeline", "pipelines are planned as layouts that are recommended"),
    ):
        disabled = top.table.get(key)
        off = isinstance(disabled, dict) and disabled.get("enabled") is False
        top.ignore(key, (1, False, disabled if off else False), why)
    top.rest(tuple(HARMLESS))
    known = draft.values.get("ranks")
    draft.batch(total, "train_batch_size", _copies(draft, known))


def _copies(draft: Draft, ranks: int | None) -> int | None:
    """Data-parallel ranks among `ranks`."""
    if ranks is None:
        return None
    apart = draft.run.get("tensor", 1)
    if ranks % apart:
        raise draft.wrong(f"{ranks} ranks cannot be divided into tensor-parallel groups of {apart}")
    return ranks // apart


def _precision(draft: Draft, top: Section, weights: str | None) -> None:
    bf16 = top.section("bf16" if "bf16" in top.table else "bfloat16")
    fp16 = top.section("fp16")
    auto = any(section.table.get("enabled") == "auto" for section in (bf16, fp16))
    for section in (bf16, fp16):
        if weights and section.table.get("enabled") == "auto":
            section.table = {**section.table, "enabled": None}  # decided by the program around DeepSpeed
    on = {"bf16": bf16.flag("enabled"), "fp16": fp16.flag("enabled")}
    chosen = [name for name, enabled in on.items() if enabled]
    if len(chosen) == 2:
        raise draft.wrong("bf16.enabled and fp16.enabled are both true; DeepSpeed takes one of them")
    if chosen and weights not in (None, *chosen) and weights != "fp32":
        raise draft.wrong(f"{chosen[0]}.enabled is true, but mixed_precision around it is {weights}; make them agree")
    if chosen or weights or not auto:
        dtype = chosen[0] if chosen else weights or "fp32"
        draft.state_run(weights=dtype, master="none" if dtype == "fp32" else "fp32")
    if bf16.flag("bf16_master_weights_and_grads"):
        draft.state_run(master="bf16", gradients="bf16")
    if bf16.flag("bf16_optimizer_states"):
        draft.state_run(moments="bf16")
    if fp16.flag("fp16_master_weights_and_grads"):
        draft.state_run(master="fp16", gradients="fp16")
    for section in (bf16, fp16):
        section.ignore("auto_cast", (False,), "activations are counted in the weights' dtype")
        section.rest(tuple(HARMLESS_SCALING))
    types = top.section("data_types")
    draft.state_run(gradients=types.word(DTYPES, "grad_accum_dtype"))
    types.rest()
    travel = top.word(DTYPES, "communication_data_type")
    draft.state_run(fp32_reduce=None if travel is None else travel == "fp32")


def _optimizer(draft: Draft, top: Section) -> None:
    optimizer = top.section("optimizer")
    kind = optimizer.text("type")
    parameters = optimizer.section("params")
    if kind is not None:
        draft.optimizer(kind, optimizer.name("type"), momentum=bool(parameters.table.get("momentum")))
    optimizer.rest(("legacy_fusion",))


def _zero(draft: Draft, zero: Section) -> None:
    stage = zero.whole("stage", least=0)
    if stage is not None and stage > 3:
        raise draft.wrong(f"zero_optimization.stage is {stage}; there are stages 0, 1, 2 and 3")
    if stage is None and zero.table.get("stage") != "auto":
        stage = 0
        draft.assumed.append("zero_optimization.stage is not given: 0, DeepSpeed's default")
    draft.state(stage=stage)
    for name in SIZES:
        size = zero.whole(name, least=0)
        if size is not None:
            draft.engine_options[name] = size
        if zero.table.get(name) == "auto" and name in AUTO:
            draft.auto.append(name)
    for name in SWITCHES:
        switch = zero.flag(name)
        if switch is not None:
            draft.engine_options[name] = switch
    _offload(draft, zero, stage)
    hpz = zero.whole("zero_hpz_partition_size", unset=(0, 1))
    mics = zero.whole("mics_shard_size", unset=(-1, 0))
    for key, degree in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)):
        if degree is not None and stage is not None and stage != 3:
            raise draft.wrong(f"zero_optimization.{key} is {degree} at stage {stage}; DeepSpeed has it at stage 3 only")
    if hpz is not None:
        draft.engine_options["zero_hpz_partition_size"] = hpz
    draft.state(weights_shard=hpz, shard=mics)
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        zero.ignore(key, (False,), "traffic is counted in 16 bits")
    zero.ignore("zeropp_loco_param", (), "its error buffers are not counted")
    zero.ignore("stage3_use_all_reduce_for_fetch_params", (False,), "gathers are counted as all-gathers")
    zero.ignore("stage3_allgather_sequential", (False,), "gathers are counted in buckets")
    zero.ignore("zenflow", (), "planned without")
    zero.rest(tuple(HARMLESS_ZERO))


def _offload(draft: Draft, zero: Section, stage: int | None) -> None:
    """`offload_optimizer` and `offload_param`, also in their old spellings `cpu_offload` and `cpu_offload_param`."""
    where = {}
    for key, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        section = zero.section(key)
        device = section.word({"none": None, "cpu": "cpu", "nvme": "nvme"}, "device")
        if device is None and zero.flag(old):
            device = "cpu"
        where[key] = device
        section.ignore("ratio", (1, 1.0), "all of it is counted as offloaded")
        section.rest(
            tuple("nvme_path pin_memory pipeline_read pipeline_write fast_init buffer_count buffer_size max_in_cpu".split())
        )
    zero.flag("cpu_offload_use_pin_memory")
    state_offload(draft, where["offload_optimizer"], where["offload_param"], stage)


def state_offload(draft: Draft, optimizer: str | None, weights: str | None, stage: int | None) -> None:
    """State what is offloaded, given the device ('cpu', 'nvme' or None) of each."""
    if weights and stage is not None and stage != 3:
        raise draft.wrong(f"offload_param is {weights} at stage {stage}; DeepSpeed offloads weights at stage 3 only")
    if weights and not optimizer:
        draft.ignored.append("offload_param without offload_optimizer: the weights are counted on the card")
    elif optimizer:
        draft.state_run(offload="optimizer+weights" if weights else "optimizer")
    if "nvme" in (optimizer, weights):
        draft.ignored.append("offload to nvme: planned as offload to CPU memory")
