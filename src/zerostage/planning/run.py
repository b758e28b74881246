"""What is asked of a run: the knobs that a plan turns. Validated, and independent of model and machine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Engine = Literal["zerostage", "fsdp2", "fsdp1", "deepspeed", "ddp", "megatron"]


class Run(BaseModel):
    """How one rank trains. Sizes are per rank; a step is `accumulation` micro-batches of `micro_batch` x `sequence` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    micro_batch: int = Field(1, ge=1, description="sequences in one forward of one rank")
    accumulation: int = Field(1, ge=1, description="micro-batches in a step")
    sequence: int = Field(4096, ge=1, description="tokens in a sequence")
    checkpointing: Literal["none", "selective", "full"] = Field(
        "full",
        description="activation checkpointing. full: a block's input is kept and the block recomputed; selective: as torchtitan's "
        "'op' policy, the outputs of every other matrix product and of attention are kept",
    )
    attention: Literal["flash", "efficient", "eager"] = Field("flash", description="kernel; only 'eager' stores the scores")
    loss: Literal["whole", "fused", "chunked", "chunked_head"] = Field(
        "whole",
        description="cross-entropy over all logits in fp32; as one kernel whose gradient takes the fp32 logits' place; of a chunk of "
        "the tokens at a time; or with the logits, too, only of a chunk at a time",
    )
    shifted_copy: bool = Field(False, description="the loss reads a shifted fp32 copy of the logits (transformers before 4.46)")
    keep_logits: bool = Field(False, description="the training loop holds the logits (fp32) while backward runs")
    chunks: int = Field(8, ge=1, description="number of chunks of a chunked loss")
    weights: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="dtype in which forward and backward compute")
    gradients: Literal["bf16", "fp16", "fp32"] | None = Field(None, description="dtype of kept gradients; None: the engine's own")
    master: Literal["fp32", "bf16", "fp16", "none"] = Field(
        "fp32", description="dtype of what the optimizer updates; none or that of the weights: no second copy"
    )
    moments: Literal["fp32", "bf16", "int8"] | None = Field(None, description="dtype of the moments; None: the masters'")
    optimizer: Literal["adamw", "sgd", "momentum", "adafactor"] = Field("adamw", description="sgd keeps no state, momentum one")
    optimizer_kernel: Literal["fused", "foreach"] | None = Field(None, description="None: the engine's own")
    offload: Literal["none", "optimizer", "optimizer+weights"] = Field("none", description="what is kept in CPU memory")
    engine: Engine = "zerostage"
    prefetch: int = Field(1, ge=0, description="units gathered ahead (zerostage)")
    keep_local: bool = Field(False, description="accumulate without communication (no_sync): reduce once a step")
    fp32_reduce: bool | None = Field(None, description="gradients travel as fp32; None: the engine's own")
    reduce_bucket_size: int | None = Field(None, ge=1, description="elements of a gradient bucket (deepspeed); None: 5e8")
    overlap_comm: bool | None = Field(None, description="a second bucket at stages 1 and 2 (deepspeed); None: no")
    contiguous_gradients: bool | None = Field(None, description="gradients are copied into the bucket (deepspeed); None: yes")
    sub_group_size: int | None = Field(None, ge=1, description="elements of a slice that one step updates at once (deepspeed 3); None: 1e9")
    stage3_prefetch_bucket_size: int | None = Field(None, ge=0, description="elements gathered ahead at a time (deepspeed 3); None: 5e7")
    stage3_max_live_parameters: int | None = Field(
        None, ge=0, description="gathered elements beyond which nothing is gathered ahead (deepspeed 3); None: 1e9"
    )
    stage3_max_reuse_distance: int | None = Field(
        None, ge=0, description="weights used again within so many elements stay gathered (deepspeed 3); None: 1e9"
    )
    stage3_param_persistence_threshold: int | None = Field(
        None, ge=0, description="weights of at most so many elements are never divided (deepspeed 3); None: 1e5"
    )
    lora_rank: int = Field(0, ge=0, description="rank of LoRA adapters on all linear layers of the blocks; the base is frozen; 0: none")
    implementation: Literal["transformers", "torchtitan", "megatron"] = Field(
        "transformers", description="whose modelling code runs: it decides which activations are saved"
    )
    fused_kernels: bool = Field(
        False, description="norms, rotary embedding and activation functions are one kernel each (torch.compile, Liger and the like)"
    )
    bucket_view: bool = Field(False, description="gradient_as_bucket_view: gradients lie in DDP's buckets (ddp)")
    tensor: int = Field(1, ge=1, description="tensor-parallel degree (with sequence parallelism of the same degree)")

    @property
    def autocast(self) -> bool:
        """Whether fp32 weights compute under torch.autocast: DDP's way to mixed precision."""
        return self.engine == "ddp" and self.master == "fp32" and self.weights != "fp32"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one rank."""
        return self.micro_batch * self.sequence


#: Moments that an optimizer keeps for each trained weight. (Adafactor: a row and a column for a matrix.)
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0, "adafactor": 0}
#: Bytes of one element.
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "none": 0}

#: What `zerostage train`, Hugging Face and others call these settings.
ALSO = {
    "sequence_length": "sequence", "seq_len": "sequence", "micro_batch_size": "micro_batch", "activation_checkpointing": "checkpointing",
    "gradient_accumulation": "accumulation", "gradient_accumulation_steps": "accumulation",
}  # fmt: skip
