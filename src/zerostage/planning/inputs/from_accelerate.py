"""An accelerate configuration, or a file of Hugging Face Trainer arguments, as a `Given`.

Keys and defaults: accelerate's ClusterConfig and FullyShardedDataParallelPlugin, transformers' TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerostage.planning.inputs import from_deepspeed
from zerostage.planning.inputs.given import DTYPES, Draft, Section

#: FSDP's sharding strategies: the stage, and whether it is divided within a node only. FSDP1 also counts them from 1.
STRATEGIES = {
    "full_shard": (3, False),
    "shard_grad_op": (2, False),
    "no_shard": (0, False),
    "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True),
}
FSDP2 = ("full_shard", "shard_grad_op")  # those that FSDP2 has, as true and false
NUMBERS = {str(number): name for number, name in enumerate(STRATEGIES, 1)}
KINDS = {"fsdp": "fsdp", "deepspeed": "deepspeed", "multi_gpu": "ddp", "multi_cpu": "ddp", "no": "ddp"}
HARMLESS = (
    "compute_environment debug downcast_bf16 machine_rank main_training_function main_process_ip main_process_port rdzv_backend "
    "same_network tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone use_cpu gpu_ids enable_cpu_affinity commands "
    "command_file tpu_vm mpirun_config dynamo_backend num_cpu_threads_per_process"
).split()
HARMLESS_FSDP = (
    "state_dict_type sync_module_states use_orig_params cpu_ram_efficient_loading transformer_layer_cls_to_wrap "
    "forward_prefetch transformer_cls_names_to_wrap xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings"
).split()
#: Of the many Trainer arguments those that touch memory or time and that are not read.
TRAINER_UNREAD = (
    "auto_find_batch_size group_by_length neftune_noise_alpha galore optim_target_modules torch_empty_cache_steps"
).split()
Load = Callable[[str], dict[str, Any]]


def fill(draft: Draft, table: dict[str, Any], load: Load, ranks: int | None = None) -> None:
    """Read accelerate's whole file `table` into `draft`.

    `load` reads a file that is named in this one, by its path relative to this one. Raises InputError for an unknown
    distributed_type or strategy and for values that contradict one another.
    """
    top = Section(draft, table)
    kind = top.word(KINDS, "distributed_type") or "ddp"
    own = top.whole("num_processes", unset=(-1,))
    nodes = top.whole("num_machines")
    if own and nodes and own % nodes:
        raise draft.wrong(f"num_processes is {own} on num_machines {nodes}: it counts all processes and must be a multiple")
    if own and ranks and own != ranks:
        draft.assumed.append(f"num_processes is {own} in the file, {ranks} ranks are planned")
    ranks = ranks or own
    draft.state(ranks=ranks, nodes=nodes)
    precision = top.word({**DTYPES, "fp8": "fp8"}, "mixed_precision")
    if precision == "fp8":
        draft.ignored.append("mixed_precision is fp8: planned as bf16")
        precision = "bf16"
    fsdp, deepspeed = top.section("fsdp_config"), top.section("deepspeed_config")
    parallelism = top.section("parallelism_config")
    if kind == "deepspeed":
        _deepspeed(draft, deepspeed, precision, load, ranks)
    else:
        _dtypes(draft, precision)
    if kind == "fsdp":
        _fsdp(draft, fsdp, version=1)
        _parallelism(draft, parallelism, ranks)
    elif kind == "ddp":
        draft.state(stage=0)
        draft.state_run(engine="ddp")
    for name, section, wanted in (("fsdp_config", fsdp, "fsdp"), ("deepspeed_config", deepspeed, "deepspeed")):
        if section.table and kind != wanted:
            draft.ignored.append(f"{name}: distributed_type is {top.table['distributed_type']}, so accelerate does not read it")
    dynamo = top.section("dynamo_config")
    backend = dynamo.value("dynamo_backend")
    draft.state_run(fused_kernels=None if backend is None else str(backend).lower() != "no")
    top.ignore("fp8_config", ({},), "planned as bf16")
    top.ignore("megatron_lm_config", ({},), "give --engine megatron with --tensor")
    top.rest(tuple(HARMLESS))


def fill_trainer(draft: Draft, table: dict[str, Any], load: Load, ranks: int | None = None) -> None:
    """Read a JSON of Trainer arguments, or what stands under `fsdp` and `fsdp_config` of one, into `draft`."""
    top = Section(draft, table)
    draft.state(ranks=ranks)
    bf16, fp16 = top.flag("bf16"), top.flag("fp16")
    if bf16 and fp16:
        raise draft.wrong("bf16 and fp16 are both true; the Trainer takes one of them")
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32" if False in (bf16, fp16) else None
    draft.state_run(
        micro_batch=top.whole("per_device_train_batch_size"),
        accumulation=top.whole("gradient_accumulation_steps"),
        sequence=top.whole("max_length", "max_seq_length", "model_max_length", "cutoff_len"),
        fused_kernels=top.flag("torch_compile"),
    )
    if top.flag("use_liger_kernel"):  # its loss is computed from the hidden states, a chunk of tokens at a time
        draft.state_run(fused_kernels=True, loss="chunked")
    checkpointing = top.flag("gradient_checkpointing")
    draft.state_run(checkpointing=None if checkpointing is None else "full" if checkpointing else "none")
    if (optimizer := top.text("optim")) is not None:
        draft.optimizer(optimizer, "optim")
    if (model := top.text("model_name_or_path")) is not None:
        draft.state(model=model)
    deepspeed = top.value("deepspeed")
    words, config = top.value("fsdp"), top.value("fsdp_config")
    if deepspeed and words:
        raise draft.wrong("fsdp and deepspeed are both given; the Trainer takes one of them")
    if isinstance(config, str):
        config = load(config)
    if deepspeed:
        _deepspeed_file(draft, deepspeed, precision, load, ranks)
    elif words or (words is None and config):
        _dtypes(draft, precision)
        _fsdp(draft, Section(draft, config or {}, "fsdp_config"), version=2, words=_words(draft, words))
    else:
        _dtypes(draft, precision)
        draft.state(stage=0)
        draft.state_run(engine="ddp")
    for key in TRAINER_UNREAD:
        top.ignore(key, (False, None, [], ""), "not modelled")


def _dtypes(draft: Draft, precision: str | None) -> None:
    """Mixed precision of accelerate: parameters are kept (or made) fp32, and computed with in `precision`."""
    if precision is None:
        return
    draft.state_run(weights=precision, master="none" if precision == "fp32" else "fp32")
    if precision == "fp32":
        draft.assumed.append("without mixed precision the model trains in the dtype in which the script loads it: fp32")


def _names(key: str) -> tuple[str, str]:
    """The spellings of a key of fsdp_config: with the prefix, as accelerate writes it, and without, as the Trainer may."""
    return f"fsdp_{key}", key


def _fsdp(draft: Draft, section: Section, version: int, words: tuple[str, ...] = ()) -> None:
    """Read `fsdp_config`. `version` is the program's default; `words` are those of the Trainer's `fsdp`."""
    stated = section.whole(*_names("version"))
    if stated is not None and stated not in (1, 2):
        raise draft.wrong(f"{section.name('fsdp_version')} is {stated}; there are versions 1 and 2")
    named = next((word for word in words if word in STRATEGIES), None)
    if stated is None:
        # these words are of the time when the Trainer knew only the first
        version = version if named in (None, *FSDP2) else 1
        draft.assumed.append(f"{section.name('fsdp_version')} is not given: {version}")
    version = stated or version
    draft.state_run(engine=f"fsdp{version}")
    strategy = section.value(*_names("sharding_strategy"))
    reshard = section.value(*_names("reshard_after_forward"))
    key, value = ("sharding_strategy", strategy) if strategy is not None else ("reshard_after_forward", reshard)
    if value is None and named is not None:
        key, value = "fsdp", named
    stage, hybrid = _strategy(draft, section, key, value, version)
    draft.state(stage=stage)
    if hybrid:
        _divide_by_node(draft, f"{section.name(key)} = {value}")
    # accelerate lets gradients travel in the dtype of mixed precision; torch's FSDP alone would as well
    if draft.run.get("weights") in ("bf16", "fp16"):
        draft.state_run(fp32_reduce=False)
    offload = section.flag(*_names("offload_params"), "cpu_offload")
    if offload or "offload" in words:
        draft.state_run(offload="optimizer+weights")
    checkpointing = section.flag(*_names("activation_checkpointing"))
    if checkpointing is not None and draft.run.get("checkpointing") != "full":
        draft.state_run(checkpointing="full" if checkpointing else "none")
        if not checkpointing:
            draft.assumed.append("no activation checkpointing, unless the script itself turns it on")
    found = {key.removeprefix("fsdp_"): key for key in map(str, section.table)}
    policy = section.word(
        dict.fromkeys(("transformer_based_wrap", "size_based_wrap", "no_wrap"), True), *_names("auto_wrap_policy")
    )
    if policy and "transformer" not in str(section.table[found["auto_wrap_policy"]]).lower():
        draft.ignored.append(f"{section.name(found['auto_wrap_policy'])}: planned with each block as one unit")
    for name, harmless, why in (
        ("min_num_params", (0, "0"), "planned with each block as one unit"),
        ("backward_prefetch", ("BACKWARD_PRE", "backward_pre"), "planned with one unit gathered ahead"),
        ("backward_prefetch_policy", ("BACKWARD_PRE", "backward_pre"), "planned with one unit gathered ahead"),
        ("limit_all_gathers", (True, "true"), "planned with a limit"),
        ("ignored_modules", (), "their parameters are counted as sharded"),
        ("activation_checkpointing_offload", (False, "false"), "checkpointed inputs are counted on the card"),
        ("mixed_precision_policy", (), "planned by mixed_precision alone"),
    ):
        section.ignore(found.get(name, name), harmless, why)
    section.rest((*HARMLESS_FSDP, *(f"fsdp_{key}" for key in HARMLESS_FSDP)))


def _strategy(draft: Draft, section: Section, key: str, value: Any, version: int) -> tuple[int, bool]:
    """Stage, and whether within nodes only, of a sharding strategy in any of its spellings."""
    name = key if key == "fsdp" else section.name(f"fsdp_{key}")
    if value is None:
        draft.assumed.append(f"{section.name('fsdp_reshard_after_forward')} is not given: FULL_SHARD")
        return STRATEGIES["full_shard"]
    word = str(value).strip().lower().removeprefix("shardingstrategy.")
    if word in ("true", "false"):
        if version == 1:
            raise draft.wrong(f"{name} is {word}, which is FSDP2's; FSDP1 takes FULL_SHARD or another strategy")
        return STRATEGIES["full_shard" if word == "true" else "shard_grad_op"]
    word = NUMBERS.get(word, word)
    table = Section(draft, {name: word})
    found = table.word(STRATEGIES, name)
    if version == 2 and word not in FSDP2:
        raise draft.wrong(f"{name} is {word}, which only FSDP1 has; FSDP2 takes true or false (or set fsdp_version: 1)")
    return found


def _divide_by_node(draft: Draft, why: str) -> None:
    ranks, nodes = draft.values.get("ranks"), draft.values.get("nodes")
    if ranks and nodes:
        draft.state(shard=ranks // nodes, replicate=nodes)
    else:
        draft.assumed.append(f"{why}: divided within a node, whose number of ranks the file does not tell")


def _parallelism(draft: Draft, section: Section, ranks: int | None) -> None:
    """accelerate's parallelism_config, whose keys begin with its own name in some files."""
    size = {
        key: section.whole(f"parallelism_config_{key}", key)
        for key in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    }
    draft.state_run(tensor=size["tp_size"])
    if (size["cp_size"] or 1) > 1:
        draft.ignored.append(f"{section.name('cp_size')} = {size['cp_size']}: sequences are counted whole on each rank")
    product = 1
    for value in size.values():
        product *= value or 1
    if section.table and ranks and product != ranks and size["dp_shard_size"]:
        degrees = " x ".join(f"{key} {value}" for key, value in size.items() if value)
        raise draft.wrong(f"{section.path}: {degrees} = {product}, but there are {ranks} ranks")
    if (size["dp_replicate_size"] or 1) > 1:
        draft.state(shard=size["dp_shard_size"], replicate=size["dp_replicate_size"])
    section.rest(("parallelism_config_cp_comm_strategy", "cp_comm_strategy", "parallelism_config_cp_rotate_method"))


def _words(draft: Draft, words: Any) -> tuple[str, ...]:
    """The Trainer's `fsdp`: true, a string of words, or a list of them."""
    if words is None or isinstance(words, bool):
        return ()
    parts = words.split() if isinstance(words, str) else words
    if not isinstance(parts, list):
        raise draft.wrong(f"fsdp is {words!r}; it must be true, or words such as 'full_shard auto_wrap'")
    known = {word: word for word in (*STRATEGIES, "offload", "auto_wrap")}
    return tuple(Section(draft, {"fsdp": part}).word(known, "fsdp") for part in parts)


def _deepspeed(draft: Draft, section: Section, precision: str | None, load: Load, ranks: int | None) -> None:
    """accelerate's deepspeed_config: its own few keys, or a DeepSpeed JSON."""
    file = section.text("deepspeed_config_file")
    stage = section.whole("zero_stage", least=0)
    if stage is not None and stage > 3:
        raise draft.wrong(f"{section.name('zero_stage')} is {stage}; there are stages 0, 1, 2 and 3")
    accumulation = section.whole("gradient_accumulation_steps")
    devices = {"none": None, "cpu": "cpu", "nvme": "nvme"}
    optimizer, weights = (section.word(devices, f"offload_{what}_device") for what in ("optimizer", "param"))
    section.rest(
        tuple(
            "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_multinode_launcher deepspeed_hostfile "
            "deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_moe_layer_cls_names offload_optimizer_nvme_path "
            "offload_param_nvme_path".split()
        )
    )
    if file is not None:
        _deepspeed_file(draft, file, precision, load, ranks)
        return
    _dtypes(draft, precision)
    draft.state_run(engine="deepspeed", accumulation=accumulation)
    if stage is None:
        stage = 2
        draft.assumed.append(f"{section.name('zero_stage')} is not given: 2, accelerate's default")
    draft.state(stage=stage)
    from_deepspeed.state_offload(draft, optimizer, weights, stage)


def _deepspeed_file(draft: Draft, file: str | dict[str, Any], precision: str | None, load: Load, ranks: int | None) -> None:
    """A DeepSpeed JSON that another configuration names, or holds."""
    if not isinstance(file, str):
        from_deepspeed.fill(draft, file, precision, ranks)
        return
    outer, draft.file = draft.file, str(file)
    from_deepspeed.fill(draft, load(file), precision, ranks)
    draft.file = outer
