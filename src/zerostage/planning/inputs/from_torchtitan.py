"""A torchtitan TOML as a `Given`. Keys and defaults: torchtitan/config/job_config.py."""

from __future__ import annotations

from typing import Any

from zerostage.planning.inputs.given import DTYPES, Draft, Section

#: Names of models elsewhere, by torchtitan's, for its flavor to be put in. (DeepSeek-V3 proper has none: it is the 671B.)
MODELS = {
    "llama3": "llama-3.1-{}",
    "llama2": "llama-2-{}",
    "qwen3": "qwen3-{}",
    "deepseek_v3": "deepseek-v3-{}",
}
HARMLESS = (
    "job profiling metrics lr_scheduler checkpoint comm memory_estimation experimental validation float8 mx quantize debug "
    "lr fault_tolerance"
).split()
HARMLESS_TRAINING = (
    "dataset dataset_path max_norm steps gc_freq gc_debug seed deterministic warmup_steps tensor_parallel_degree "
    "data_parallel_shard_degree data_parallel_replicate_degree data_parallel_degree enable_fp8_linear "
    "debug_moe_force_load_balance"
).split()


def fill(draft: Draft, table: dict[str, Any]) -> None:
    """Read the whole file `table` into `draft`. Raises InputError for values that contradict one another."""
    top = Section(draft, table)
    draft.state_run(engine="fsdp2", implementation="torchtitan")
    _model(draft, top.section("model"))
    training = top.section("training")
    # older files keep the degrees of data and tensor parallelism under [training], pipelines under [experimental]
    parallelism = top.section("parallelism" if "parallelism" in table else "training")
    copies = _degrees(draft, parallelism, top.section("experimental"))
    _training(draft, training, copies)
    _checkpointing(draft, top.section("activation_checkpoint"))
    _optimizer(draft, top.section("optimizer"))
    compiling = top.section("compile")
    draft.state_run(fused_kernels=compiling.flag("enable") if compiling.table else training.flag("compile"))
    compiling.rest(("components", "backend"))
    training.rest(tuple(HARMLESS_TRAINING))
    if parallelism.path == "parallelism":
        parallelism.rest(
            tuple(
                "disable_loss_parallel enable_async_tensor_parallel enable_compiled_autograd pipeline_parallel_schedule "
                "pipeline_parallel_split_points pipeline_parallel_schedule_csv pipeline_parallel_layers_per_stage "
                "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
                "context_parallel_rotate_method".split()
            )
        )
    top.rest(tuple(HARMLESS))


def _model(draft: Draft, model: Section) -> None:
    name, flavor = model.text("name"), model.text("flavor")
    if name and flavor:
        pattern = MODELS.get(name.lower(), f"{name}-{{}}")
        draft.state(model=pattern.format(flavor.lower()).removesuffix("-671b"))
    model.ignore("converters", ([], ""), "planned without: linear layers are counted in the weights' dtype")
    model.rest(("tokenizer_path", "hf_assets_path", "print_after_conversion", "norm_type"))


def _degrees(draft: Draft, section: Section, experimental: Section) -> int | None:
    """State stage, degrees and ranks; return the number of data-parallel ranks if it is known."""
    shard = section.whole("data_parallel_shard_degree", "data_parallel_degree", unset=(-1,))
    replicate = section.whole("data_parallel_replicate_degree") or 1
    tensor = section.whole("tensor_parallel_degree") or 1
    pipeline = section.whole("pipeline_parallel_degree") or experimental.whole("pipeline_parallel_degree") or 1
    context = section.whole("context_parallel_degree") or experimental.whole("context_parallel_degree") or 1
    if pipeline > 1:
        raise draft.wrong(f"pipeline_parallel_degree is {pipeline}: a pipeline is planned as a layout that is recommended, not from a file")
    draft.state_run(tensor=tensor)
    for key in ("context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree"):
        section.ignore(key, (1,), "planned without")
    section.ignore("pipeline_parallel_microbatch_size", (), "the local batch is planned as one micro-batch")
    reshard = section.word({"default": None, "always": 3, "never": 2}, "fsdp_reshard_after_forward")
    # torchtitan's default: weights are freed after forward
    stage = reshard or 3
    if shard == 1:
        stage = 0
        draft.state_run(engine="ddp")
    draft.state(stage=stage)
    if replicate > 1 and shard != 1:
        draft.state(shard=shard, replicate=replicate)
    if shard is None:
        draft.assumed.append("data_parallel_shard_degree is -1 or not given: all ranks that the other degrees leave")
        return None
    draft.state(ranks=shard * replicate * tensor * context)
    return shard * replicate


def _training(draft: Draft, training: Section, copies: int | None) -> None:
    batch = training.whole("local_batch_size", "batch_size")
    sequence = training.whole("seq_len")
    for value, key, default in ((batch, "local_batch_size", 8), (sequence, "seq_len", 2048)):
        if value is None:
            draft.assumed.append(f"training.{key} is not given: {default}, torchtitan's default")
    draft.state_run(micro_batch=batch or 8, sequence=sequence or 2048)
    total = training.whole("global_batch_size", unset=(-1,))
    if total is None:
        draft.state_run(accumulation=1)
    draft.batch(total, "training.global_batch_size", copies)
    compute = training.word(DTYPES, "mixed_precision_param")
    stored = training.word(DTYPES, "dtype") or "fp32"
    reduce = training.word(DTYPES, "mixed_precision_reduce")
    if compute is None:
        compute = "bf16"
        draft.assumed.append("training.mixed_precision_param is not given: bfloat16, torchtitan's default")
    draft.state_run(weights=compute, master="none" if compute == stored else stored, fp32_reduce=reduce in (None, "fp32"))
    if training.flag("enable_cpu_offload"):
        draft.state_run(offload="optimizer+weights")


def _checkpointing(draft: Draft, section: Section) -> None:
    modes = {"none": "none", "full": "full", "selective": "selective", "memory_budget": "memory_budget"}
    mode = section.word(modes, "mode")
    if mode is None:
        mode = "selective"
        draft.assumed.append("activation_checkpoint.mode is not given: selective, torchtitan's default")
    option = section.value("selective_ac_option")
    if mode == "memory_budget":
        draft.ignored.append("activation_checkpoint.mode = 'memory_budget': give --checkpointing")
        return
    draft.state_run(checkpointing=mode)
    if mode == "selective" and str(option or "2") != "op":
        every = f"every layer of {option or 2}" + ("" if option else " (torchtitan's default)")
        draft.ignored.append(f"activation_checkpoint.selective_ac_option is not 'op' but {every}: planned as 'op'")
    section.rest(
        ("per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget", "visualize_memory_budget_pareto")
    )


def _optimizer(draft: Draft, section: Section) -> None:
    name = section.text("name")
    if name is not None:
        draft.optimizer(name, section.name("name"))
    kernel = section.word(
        {"fused": "fused", "foreach": "foreach", "for-loop": None, "fused_opt_states_bf16": "fused"}, "implementation"
    )
    if section.flag("fused") is False:
        kernel = "foreach"
    draft.state_run(optimizer_kernel=kernel)
    section.ignore("implementation", ("fused", "foreach"), "planned as the engine's own kernel")
    section.ignore("early_step_in_backward", (False,), "planned with a step after backward")
    section.rest(("lr", "eps", "beta1", "beta2", "weight_decay"))
