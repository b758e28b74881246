"""What a card has to do for a model: FLOPs, bytes moved, kernels started; and the seconds that they take.

Matrix products run at the card's planned rate (`Card.flops`), less what does not fill its processors; everything else
is counted by the bytes that it reads and writes. Nothing here knows of other ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerostage.planning.model.architecture import Architecture, Block, Unit, Weight
from zerostage.planning.run import ITEMSIZE, MOMENTS, Run
from zerostage.planning.timing.hardware import MEMORY_REACHED, Card

#: Seconds of host time for one eager operation of a forward or backward: dispatch, autograd, launch.
LAUNCH_S = 8e-6
#: A flash-attention backward recomputes the scores: five products for the forward's two, and it reaches 0.85 of the
#: forward's rate (Dao 2023, "FlashAttention-2", figures 4 to 6).
ATTENTION_BACKWARD, ATTENTION_BACKWARD_RATE = 2.5, 0.85
#: fp32 products without TF32 (torch's default) against bf16: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100.
FP32_RATE = 1 / 16

#: Modules whose weights are divided by inputs in tensor parallelism.
_ROWS = ("o_proj", "out_proj", "wo", "down_proj", "w2", "c_proj", "dense_4h_to_h", "fc2")


def is_lookup(weight: Weight, architecture: Architecture) -> bool:
    """Whether a weight is only looked up (an embedding), so that no product runs over it. A tied one is the head too."""
    modules = [name.split(".")[-2] if "." in name else name for name in weight.names]
    if any(module in ("lm_head", "head", "output", "embed_out", "score") for module in modules) or len(modules) > 1:
        return False
    looked_up = "emb" in modules[0] or modules[0] in ("wte", "wpe")
    return looked_up and len(weight.shape) == 2 and not (architecture.tied and architecture.vocab in weight.shape)


def is_head(weight: Weight, architecture: Architecture) -> bool:
    """Whether a weight turns hidden states into logits."""
    return architecture.vocab > 1 and architecture.vocab in weight.shape and not is_lookup(weight, architecture)


def product_parameters(architecture: Architecture) -> int:
    """Parameters that a token is multiplied with: active ones, without looked-up embeddings."""
    return round(sum(w.numel * w.active for w in architecture.weights if not is_lookup(w, architecture)))


def flops_per_token(architecture: Architecture, sequence: int) -> float:
    """Model FLOPs of forward and backward for one token, by which model FLOP utilisation is usually counted.

    6 N + 12 l h q t: N (of which frozen weights count 4, having no gradient of their own) without looked-up embeddings, l layers of h heads of size q over t tokens; the causal half is not
    taken off, nothing is recomputed (torchtitan's convention, from PaLM, appendix B), so that published figures compare.
    """
    scores = sum(12 * block.heads * block.head_dim * min(sequence, block.window or sequence) for block in architecture.blocks)
    frozen = sum(w.numel * w.active for w in architecture.weights if not w.trainable and not is_lookup(w, architecture))
    return 6 * product_parameters(architecture) - 2 * frozen + scores


@dataclass(frozen=True)
class Seconds:
    """One unit's computation for one micro-batch. `backward` contains what is recomputed."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)


class Worker:
    """Times of one card for one run of one model, of which this card has one of `tensor` slices of each layer."""

    def __init__(self, architecture: Architecture, run: Run, card: Card, tensor: int = 1, tokens: int | None = None) -> None:
        self.architecture, self.run, self.card, self.tensor = architecture, run, card, tensor
        self.tokens = tokens or run.tokens
        self.rate = card.flops * (FP32_RATE if run.weights == "fp32" else 1)
        self.item = ITEMSIZE[run.weights]
        self.wide = self.item / 2  # activations are counted in bf16
        self._blocks = {block.name: block for block in architecture.blocks}
        self._known: dict[tuple, Seconds] = {}

    def moved_s(self, size: float) -> float:
        """Seconds to read and write `size` bytes in all."""
        return size / (self.card.bandwidth * MEMORY_REACHED)

    def product_s(self, m: float, n: float, k: float) -> float:
        """Seconds of an (m, k) x (k, n) product.

        Processors work on tiles of 128 x 256 results (the largest that cuBLAS uses on Ampere and later), in rounds: a last
        round that is not full costs as much as a full one. Below some size the bytes of the operands decide.
        """
        if min(m, n, k) <= 0:
            return 0.0
        rounds = [math.ceil(m / a) * math.ceil(n / b) / self.card.processors for a, b in ((128, 256), (256, 128))]
        padded = min(math.ceil(r) / r for r in rounds) * min(
            math.ceil(m / a) * a * math.ceil(n / b) * b / (m * n) for a, b in ((128, 256), (256, 128))
        )
        if min(rounds) < 1:  # too few tiles: smaller ones, or a division of k, keep about half of the lost part busy
            padded = math.sqrt(padded)
        return max(2 * m * n * k * padded / self.rate, self.moved_s(self.item * (m * n + n * k + m * k)))

    def _products(self, weight: Weight) -> tuple[float, float]:
        """(forward, backward) seconds of the products over one weight."""
        if len(weight.shape) < 2 or is_lookup(weight, self.architecture):
            return 0.0, 0.0
        count = weight.shape[0] if len(weight.shape) == 3 else 1
        n, k = (
            (weight.shape[-2], weight.shape[-1])
            if count > 1 or len(weight.shape) == 2
            else (weight.shape[0], weight.numel // weight.shape[0])
        )
        rows = self.tokens * weight.active
        row_wise = any(part in _ROWS for part in weight.name.split("."))
        n, k = (n, k / self.tensor) if row_wise else (n / self.tensor, k)
        forward = count * self.product_s(rows, n, k)
        backward = count * self.product_s(rows, k, n)
        if weight.trainable:
            backward += count * self.product_s(n, k, rows)
        return forward, backward

    def _attention(self, block: Block) -> tuple[float, float]:
        width = block.heads * block.head_dim / self.tensor
        span = min(self.run.sequence, block.window or self.run.sequence)
        pairs = span * (1 - span / (2 * self.run.sequence))  # causal: keys that a query sees, on average
        if self.run.attention == "eager":  # all scores are computed, and stored: bf16 scores, mask, fp32 softmax, bf16 weights
            flops = 4 * width * self.run.sequence * self.tokens
            scores = block.heads / self.tensor * self.run.sequence * self.tokens
            return flops / self.rate + self.moved_s(24 * scores), 2 * flops / self.rate + self.moved_s(30 * scores)
        rate = self.card.flops_peak * self.card.attention * (FP32_RATE if self.run.weights == "fp32" else 1)
        rate *= 1 if block.head_dim >= 128 else 0.85  # small heads leave the products waiting for the exponentials
        rate *= 0.7 if self.run.attention == "efficient" else 1
        forward = 4 * width * pairs * self.tokens / rate
        return forward, ATTENTION_BACKWARD / ATTENTION_BACKWARD_RATE * forward

    def _elementwise(self, block: Block) -> tuple[float, float, int, int]:
        """(forward bytes, backward bytes, forward kernels, backward kernels) of one block, without its products.

        Bytes per element in bf16. Eager RMS norms widen to fp32 and pass over it six times (36), fused ones read and write
        once (4). Rotary embedding: two multiplications, a rotation and a sum (20). SwiGLU: 4 for silu, 6 for the product.
        """
        run, h = self.run, self.architecture.hidden
        queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
        ffn = block.ffn * max(1, block.experts_per_token) + block.shared_ffn
        fused = run.fused_kernels or run.implementation == "megatron"
        norm = (4, 10) if fused or block.norm == "layer" else (36, 64)
        rotary, gate = ((4, 4), (6, 10)) if fused else ((20, 20), (10, 18))
        gate = gate if block.gated else (4, 6)
        normed = block.norms * h + (block.qk_norm and queries + keys)
        forward = norm[0] * normed + 12 * h + rotary[0] * (queries + keys) + gate[0] * ffn + 4 * (queries + keys)
        backward = norm[1] * normed + 12 * h + rotary[1] * (queries + keys) + gate[1] * ffn + 8 * (queries + keys)
        if block.experts:  # tokens are brought to their experts and back
            forward, backward = forward + 8 * h * block.experts_per_token, backward + 16 * h * block.experts_per_token
        if block.dropout:
            forward, backward = forward + 10 * h, backward + 10 * h
        kernels = 16 if fused else 22 + 8 * block.norms
        kernels += 3 * block.experts
        scale = self.wide * self.tokens / self.tensor
        return forward * scale, backward * scale, kernels, 2 * kernels

    def unit(self, unit: Unit) -> Seconds:
        """Seconds of one micro-batch in a unit, with what its checkpointing recomputes; its head, if any, apart (`head`)."""
        block = self._blocks.get(unit.name)
        key = (
            block and (block.ffn, block.window, block.experts, block.heads),
            tuple((w.shape, w.active, w.trainable) for w in unit.weights),
        )
        if key not in self._known:
            self._known[key] = self._unit(unit, block)
        return self._known[key]

    def _unit(self, unit: Unit, block: Block | None) -> Seconds:
        forward = backward = 0.0
        for weight in unit.weights:
            if not is_head(weight, self.architecture):
                f, b = self._products(weight)
                forward, backward = forward + f, backward + b
        if block is None:  # an embedding or a leftover: rows looked up, and their gradients added
            looked_up = any(is_lookup(w, self.architecture) or is_head(w, self.architecture) for w in unit.weights)
            size = 4 * self.tokens * self.architecture.hidden * looked_up
            return Seconds(forward + self.moved_s(size), backward + self.moved_s(3 * size))
        products = forward
        attended, attended_back = self._attention(block)
        moved, moved_back, kernels, kernels_back = self._elementwise(block)
        forward = max(products + attended + self.moved_s(moved), kernels * LAUNCH_S)
        recompute = 0.0
        if self.run.checkpointing == "full":
            recompute = forward
        elif self.run.checkpointing == "selective":  # every other product; attention's output is kept
            recompute = max(products / 2 + self.moved_s(moved), kernels * LAUNCH_S)
        backward = max(backward + attended_back + self.moved_s(moved_back), kernels_back * LAUNCH_S)
        return Seconds(forward, backward + recompute)

    def head(self) -> Seconds:
        """Seconds of the logits and the loss of one micro-batch.

        Bytes per logit: written in bf16, widened to fp32, log-softmax (reads twice, writes once): 26; backward: its gradient,
        narrowed: 24. Compiled or chunked losses keep the intermediate results out of memory: 10 and 10.
        """
        seconds = Seconds(0.0, 0.0)
        for weight in self.architecture.weights:
            if is_head(weight, self.architecture):
                seconds += Seconds(*self._products(weight))
                per_logit = (10, 10) if self.run.fused_kernels or self.run.loss != "whole" else (26, 24)
                logits = self.tokens * self.architecture.vocab / self.tensor
                seconds += Seconds(*(self.moved_s(size * logits) for size in per_logit))
        return seconds

    def update(self, parameters: float) -> float:
        """Seconds of the optimizer's step over `parameters` parameters of this rank, on the card.

        Fused AdamW reads and writes master and both moments once, reads gradients and writes the weights; torch's foreach
        kernels pass over fp32 values 21 times (eight operations of two or three operands each).
        """
        run = self.run
        master = ITEMSIZE[run.weights if run.master == "none" else run.master]
        moment = ITEMSIZE[run.moments] if run.moments else master
        gradient = ITEMSIZE[run.gradients] if run.gradients else self.item
        moments = MOMENTS[run.optimizer]
        size = 2 * master + 2 * moment * moments + gradient + (self.item if run.master not in ("none", run.weights) else 0)
        foreach = run.optimizer_kernel == "foreach" or run.optimizer_kernel is None and run.engine in ("fsdp1", "ddp")
        if run.optimizer == "adafactor":
            size = 12 * master
        elif foreach and moments:
            size = (21 if moments == 2 else 8) * master + gradient
        return self.moved_s((size + gradient) * parameters)  # gradients are read once more for their norm
