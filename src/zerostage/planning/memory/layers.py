"""What the modelling code of a transformer computes, operation by operation, as tapes.

Sizes are bytes. T is the number of tokens in a micro-batch, b of `c` bytes the compute dtype. Each function follows
the code that it names: what that saves for backward is what decides the memory of activations. With tensor
parallelism (and sequence parallelism beside it) heads and widths are divided by its degree, and so are the tokens
of what lies between blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerostage.planning.memory.tape import Tape, Tensor
from zerostage.planning.model.architecture import Architecture, Block
from zerostage.planning.run import ITEMSIZE, Run

#: Families with learned or additive positions.
NO_ROTARY = ("gpt2", "opt", "bloom")
#: Families with one projection for queries, keys and values.
FUSED_QKV = ("gpt2", "phi3", "gpt_neox", "falcon", "bloom")
#: Families whose RMS norm multiplies by 1 + weight in fp32 (modeling_gemma2.py), and whose embeddings are scaled.
GEMMA = ("gemma", "gemma2", "gemma3_text")
#: Families whose attention has its softmax in the compute dtype (modeling_gpt2.py, eager_attention_forward).
NARROW_SOFTMAX = ("gpt2",)
#: Families that bend attention scores and logits by a tanh (attn_logit_softcapping, final_logit_softcapping).
SOFT_CAPS = ("gemma2",)


class Layers:
    """The tapes of one architecture under one run."""

    def __init__(self, architecture: Architecture, run: Run) -> None:
        self.architecture, self.run = architecture, run
        self.c = ITEMSIZE[run.weights]
        #: Bytes of an element between blocks and behind norms: torch.autocast computes only matrix products in 16 bits.
        self.wide = 4 if run.autocast else self.c
        self.tokens = run.tokens
        self.between = -(-run.tokens // run.tensor)  # tokens of a tensor between blocks, under sequence parallelism
        #: torchtitan's tensor parallelism (apply_tp in parallelize_llama.py): DTensors, and the loss on slices of the vocabulary
        self.gathers = run.implementation == "torchtitan" and run.tensor > 1
        self.hidden = architecture.hidden
        self.inside = {unit.name: unit.weights for unit in architecture.units}
        self._biased: frozenset[str] = frozenset()
        self._products = 0
        self._blocks: dict[tuple, Tape] = {}

    # Pieces

    def _trains(self, elements: int) -> dict[str, Any]:
        """The weight of that many elements that an operation uses, where it is to be trained."""
        return {"weight": elements} if self.trained else {}

    def _kept(self) -> bool:
        """Whether selective checkpointing keeps the next matrix product: the first, third, ... of a block.

        torchtitan's policy (activation_checkpoint.py, _apply_op_sac) counts aten.mm; a product with a bias is aten.addmm.
        """
        self._products += 1
        return self._products % 2 == 1

    def _linear(self, tape: Tape, x: Tensor, inputs: int, outputs: int, place: str = "mlp") -> Tensor:
        """y = x W: saves x for the weight's gradient (a frozen weight needs none). place: 'qkv', 'out' or 'mlp'."""
        rows, c = self.tokens, self.c
        weight = self._trains(inputs * outputs)
        x = self._cast(tape, x, rows * inputs)
        policy = place not in self._biased and self._kept()
        y = tape.op("linear", [x], [c * rows * outputs], saves="in" if weight else "", kept_by_policy=policy, **weight)
        if rank := self.run.lora_rank:  # peft: y + B(A(x)) * scaling
            kept = self._kept()
            down = tape.op("lora_A", [x], [c * rows * rank], saves="in", weight=rank * inputs, kept_by_policy=kept)
            kept = self._kept()
            up = tape.op("lora_B", [down], [c * rows * outputs], saves="in", weight=rank * outputs, kept_by_policy=kept)
            scaled = tape.op("scaling", [up], [c * rows * outputs])
            y = tape.op("add", [y, scaled], [c * rows * outputs], same_grad=True)
        return y

    def _cast(self, tape: Tape, x: Tensor, elements: int) -> Tensor:
        """What autocast gives to a matrix product: a 16-bit copy of an fp32 tensor, one for each product that it goes into."""
        return tape.op("cast", [x], [self.c * elements], term=x.term) if x.size > self.c * elements else x

    def _gathered(self, tape: Tape, x: Tensor) -> Tensor:
        """All tokens of what each rank has a slice of. Matrix products save the whole; backward gathers nothing anew."""
        if not self.gathers:
            return x
        size = self.run.tensor * x.size
        return tape.op("all_gather", [x], [size], forward_temp=self._moved(size), backward_temp=size)

    def _scattered(self, tape: Tape, x: Tensor) -> Tensor:
        """A rank's tokens of a sum over ranks. torchtitan's selective checkpointing keeps what reduce_scatter_tensor gives."""
        if not self.gathers:
            return x
        rest = {"forward_temp": x.size, "backward_temp": self._moved(x.size), "kept_by_policy": True}
        return tape.op("reduce_scatter", [x], [x.size // self.run.tensor], **rest)

    def _moved(self, size: int) -> int:
        """Bytes of the copy that puts gathered slices of the second dimension, the sequence, in their places: none where the
        first is 1. Before a reduce-scatter the slices are always copied (_functional_collectives.py)."""
        return size if self.run.micro_batch > 1 else 0

    def _norm(self, tape: Tape, x: Tensor, kind: str, width: int, rows: int) -> Tensor:
        """LayerNorm is one kernel that saves its input. RMSNorm in transformers and torchtitan is written out:
        x in fp32 (saved, a copy where x is 16-bit), times its rsqrt, back in x's dtype (saved), times the weight."""
        size, c, out = rows * width, x.size // (rows * width), self.wide
        small = self._trains(width)
        if kind == "layer":
            return tape.op("layer_norm", [x], [out * size, 8 * rows], saves="in", **small)
        if self.run.fused_kernels:  # one generated kernel, which keeps x and a number per row
            return tape.op("rms_norm", [x], [out * size, 4 * rows], saves="in", **small)
        wide = tape.op("to fp32", [x], [4 * size]) if c < 4 else x
        root = tape.op("rsqrt of mean", [wide], [4 * rows], saves="in", forward_temp=4 * size, backward_temp=12 * size)
        product = tape.op("normalize", [wide, root], [4 * size], saves="in", backward_temp=4 * size)
        if self.architecture.family in GEMMA:
            product = tape.op("times weight", [product], [4 * size], saves="in", backward_temp=4 * size, **small)
            return tape.op("from fp32", [product], [c * size]) if c < 4 else product
        narrow = tape.op("from fp32", [product], [c * size]) if c < 4 else product
        return tape.op("times weight", [narrow], [out * size], saves="in", backward_temp=out * size, **small)

    def _attention(self, tape: Tape, x: Tensor, block: Block) -> Tensor:
        run, T, c, h, t = self.run, self.tokens, self.c, self.hidden, self.run.tensor
        heads, kv = max(1, block.heads // t), max(1, block.kv_heads // t)
        A, K = heads * block.head_dim, kv * block.head_dim
        if self.architecture.family in FUSED_QKV:  # views of one result: it stays as long as one of them
            q, k, v = self._split(tape, self._linear(tape, x, h, A + 2 * K, "qkv"), T * A, T * K)
        else:
            q = self._linear(tape, x, h, A, "qkv")
            k = self._linear(tape, x, h, K, "qkv")
            v = self._linear(tape, x, h, K, "qkv")
        if block.qk_norm:
            q = self._norm(tape, q, "rms", block.head_dim, T * heads)
            k = self._norm(tape, k, "rms", block.head_dim, T * kv)
        if self.architecture.family not in NO_ROTARY:
            q, k = self._rotary(tape, q, T * A), self._rotary(tape, k, T * K)
        q, k = self._cast(tape, q, T * A), self._cast(tape, k, T * K)
        repeated = kv != heads and (run.implementation == "torchtitan" or run.attention == "efficient")
        if repeated or (kv != heads and run.attention == "eager"):  # copies of keys and values for each head
            k, v = tape.op("repeat", [k], [c * T * A]), tape.op("repeat", [v], [c * T * A])
        if run.attention == "eager":
            out = self._eager(tape, q, k, v, heads, A)
        else:
            # FlashAttention-2 keeps q, k, v, the result and a log-sum-exp per row and head; backward has fp32 sums of
            # dq, a row sum, and dk, dv for each head before they are added up (Dao 2023; flash_api.cpp)
            temp = 4 * T * A + 4 * T * heads + (2 * c * T * A if kv != heads and not repeated else 0)
            out = tape.op(
                "flash_attention", [q, k, v], [c * T * A, 4 * T * heads], saves="in out", backward_temp=temp, kept_by_policy=True
            )
        if self.architecture.family == "phi3":  # queries put together by torch.cat lie head by head, and so does the result
            out = tape.op("contiguous", [out], [c * T * A])
        return self._linear(tape, out, A, h, "out")

    def _split(self, tape: Tape, joint: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one result. Phi-3 takes three slices, whose gradients are each as large as the whole."""
        sizes = [self.c * queries, self.c * keys, self.c * keys]
        if self.architecture.family == "phi3":
            q, k, v = (tape.views("slice", joint, [size])[0] for size in sizes)
        else:
            q, k, v = tape.views("split", joint, sizes)
        return q, k, v

    def _rotary(self, tape: Tape, x: Tensor, size: int) -> Tensor:
        """x cos + rotate_half(x) sin: the products save only cos and sin, which need no gradient."""
        c = self.wide
        if self.run.fused_kernels:
            return tape.op("rotary", [x], [c * size])
        if self.run.implementation == "torchtitan":  # as complex fp32 numbers
            return tape.op("rotary", [x], [c * size], forward_temp=8 * size, backward_temp=8 * size)
        return tape.op("rotary", [x], [c * size], forward_temp=3 * c * size, backward_temp=3 * c * size)

    def _eager(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: int, A: int) -> Tensor:
        """transformers' eager_attention_forward: scores, mask, softmax in fp32, all of the size heads x sequence x sequence."""
        run, T, c = self.run, self.tokens, self.c
        scores = run.micro_batch * heads * run.sequence * run.sequence
        s = tape.op("scores", [q, k], [c * scores], saves="in")
        s = tape.op("scale", [s], [c * scores])
        if self.architecture.family in SOFT_CAPS:
            s = self._soft_cap(tape, s, c * scores)
        s = tape.op("mask", [s], [c * scores], same_grad=True)
        if c == 4 or self.architecture.family in NARROW_SOFTMAX:
            p = tape.op("softmax", [s], [c * scores], saves="out")
        else:
            p = tape.op("softmax", [s], [4 * scores], saves="out", forward_temp=4 * scores)
            p = tape.op("from fp32", [p], [c * scores])
        return tape.op("weighted sum", [p, v], [c * T * A], saves="in", forward_temp=c * T * A)

    def _soft_cap(self, tape: Tape, x: Tensor, size: int) -> Tensor:
        """tanh(x / cap) * cap"""
        tanh = tape.op("tanh", [tape.op("divide", [x], [size], term=x.term)], [size], saves="out", term=x.term)
        return tape.op("times", [tanh], [size], term=x.term)

    def _mlp(self, tape: Tape, x: Tensor, block: Block, width: int) -> Tensor:
        T, c, h, f = self.tokens, self.c, self.hidden, width // self.run.tensor
        if not block.gated:
            up = self._linear(tape, x, h, f)
            written_out = block.activation == "gelu_new" and not self.run.fused_kernels
            act = self._gelu_new(tape, up, c * T * f) if written_out else self._activation(tape, up, c * T * f, block.activation)
            return self._linear(tape, act, f, h)
        if self.architecture.family == "phi3":
            gate, up = tape.views("chunk", self._linear(tape, x, h, 2 * f), [c * T * f] * 2)
        else:
            gate, up = self._linear(tape, x, h, f), self._linear(tape, x, h, f)
        if self.run.fused_kernels:  # one kernel, and backward computes the product again
            product = tape.op("silu times", [gate, up], [c * T * f], saves="in")
        else:
            product = tape.op("times", [self._activation(tape, gate, c * T * f), up], [c * T * f], saves="in")
        return self._linear(tape, product, f, h)

    def _activation(self, tape: Tape, x: Tensor, size: int, name: str = "silu") -> Tensor:
        return tape.op("activation", [x], [size], saves="out" if name == "relu" else "in")

    def _gelu_new(self, tape: Tape, x: Tensor, size: int) -> Tensor:
        """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), an operation at a time."""
        if self.wide > self.c:  # autocast has powers in fp32
            size = self.wide * (x.size // self.c)
            x = tape.op("to fp32", [x], [size])
        cube = tape.op("pow", [x], [size], saves="in", backward_temp=2 * size)
        inner = tape.op("add", [x, tape.op("times", [cube], [size])], [size], same_grad=True)
        tanh = tape.op("tanh", [tape.op("times", [inner], [size])], [size], saves="out")
        half = tape.op("times", [x], [size])
        return tape.op("times", [half, tape.op("add", [tanh], [size], same_grad=True)], [size], saves="in")

    def _experts(self, tape: Tape, x: Tensor, block: Block) -> Tensor:
        """Each token goes through `experts_per_token` experts; it is copied to where they take it."""
        T, c, h, f = self.tokens, self.c, self.hidden, block.ffn // self.run.tensor
        routed = T * block.experts_per_token
        logits = tape.op("router", [x], [c * T * block.experts], saves="in", kept_by_policy=self._kept(), **self._trains(h * block.experts))
        scores = tape.op("softmax", [logits], [4 * T * block.experts], saves="out")
        taken = tape.op("dispatch", [x], [c * routed * h])
        up = tape.op("gate and up", [taken], [2 * c * routed * f], saves="in", **self._trains(2 * block.experts * f * h))
        gate = tape.op("activation", [up], [c * routed * f], saves="in")
        product = tape.op("times", [gate], [c * routed * f], saves="in")
        down = tape.op("down", [product], [c * routed * h], saves="in", **self._trains(block.experts * f * h))
        scaled = tape.op("times score", [down, scores], [c * routed * h], saves="in")
        out = tape.op("combine", [scaled], [c * T * h])
        if block.shared_ffn:
            out = tape.op("add", [out, self._mlp(tape, x, block, block.shared_ffn)], [c * T * h], same_grad=True)
        return out

    # Parts of the model

    def block(self, block: Block) -> Tape:
        """norm, attention, add, norm, MLP, add."""
        key = (replace(block, name="", activation=str(block.activation)), self.architecture.trains(block.name), self._biases(block.name))
        if key not in self._blocks:
            self._blocks[key] = self._block(*key)
        return self._blocks[key]

    def _biases(self, name: str) -> frozenset[str]:
        """Where a block's linear layers have biases: 'qkv', 'out', 'mlp'."""
        found = set()
        for path in (w.name.split(".")[:-1] for w in self.inside.get(name, ()) if w.name.endswith(".bias")):
            if any("attn" in part or "attention" in part for part in path[:-1]):
                found.add("out" if path[-1] in ("o_proj", "out_proj", "c_proj", "dense") else "qkv")
            elif "norm" not in path[-1] and not path[-1].startswith("ln_"):
                found.add("mlp")
        return frozenset(found)

    def _block(self, block: Block, trained: bool, biased: frozenset[str]) -> Tape:
        self.trained, self._biased, self._products = trained, biased, 0
        rows, size = self.between, self.wide * self.between * self.hidden
        x = Tensor(size)
        tape = Tape(x)
        n = self._norm(tape, x, block.norm, self.hidden, rows)
        n = self._gathered(tape, n)
        a = self._scattered(tape, self._attention(tape, n, block))
        if block.norms == 1:  # attention and MLP side by side, of one norm
            m = self._scattered(tape, self._mlp(tape, n, block, block.ffn))
            tape.op("add", [tape.op("add", [a, m], [size], same_grad=True), x], [size], same_grad=True)
            return tape
        if block.norms == 4:
            a = self._norm(tape, a, block.norm, self.hidden, rows)
        y = tape.op("add", [x, a], [size], same_grad=True)
        n = self._gathered(tape, self._norm(tape, y, block.norm, self.hidden, rows))
        m = self._scattered(tape, self._experts(tape, n, block) if block.experts else self._mlp(tape, n, block, block.ffn))
        if block.norms == 4:
            m = self._norm(tape, m, block.norm, self.hidden, rows)
        tape.op("add", [y, m], [size], same_grad=True)
        return tape

    def embedding(self, trained: bool) -> Tape:
        self.trained = trained
        tape = Tape(None)
        elements = self.architecture.vocab * self.hidden // self.run.tensor
        rows = self.tokens if self.gathers else self.between  # of a slice of the table, before the sum over ranks
        size, tables = self.wide * rows * self.hidden, Tensor(self._tables())
        x = tape.op(
            "embedding", [Tensor(0, needs_grad=False)], [size, tables.size], needs_grad=True, saves=[tables], **self._trains(elements)
        )
        if trained and self.architecture.tied:
            tape.ops[-1].leaves = -self.c * elements
        tape.ops[-1].outputs[1] = tables
        x = self._scattered(tape, x)
        if self.architecture.family in GEMMA:
            tape.op("scale", [x], [x.size])
        return tape

    def _tables(self) -> int:
        """Bytes that all blocks share: cosines and sines; under checkpointing, which keeps arguments, the mask of eager attention."""
        run, block = self.run, next(iter(self.architecture.blocks), None)
        rotary = 2 * run.sequence * block.head_dim if block and self.architecture.family not in NO_ROTARY else 0
        windows = {block.window for block in self.architecture.blocks}
        mask = len(windows) * run.tokens * run.sequence if run.attention == "eager" and run.checkpointing != "none" else 0
        return self.wide * (rotary + mask)

    def head(self, trained: bool) -> Tape:
        """Final norm, logits, and cross-entropy in fp32.

        transformers' ForCausalLMLoss: logits in fp32, log-softmax (saved), mean. Backward has log-softmax, the gradient
        of it and that of the logits at once. 'chunked': logits of all tokens, the loss in fp32 of a part of them at a time.
        'chunked_head': logits, too, only of a part of the tokens, made again in backward.
        """
        self.trained = trained
        run, c = self.run, self.c
        x = Tensor(self.wide * self.between * self.hidden)
        tape = Tape(x)
        norm = self.architecture.blocks[-1].norm if self.architecture.blocks else "rms"
        n = self._cast(tape, self._norm(tape, x, norm, self.hidden, self.between), self.between * self.hidden)
        n = self._gathered(tape, n)
        size = -(-self.tokens // (run.chunks if run.loss == "chunked_head" else 1)) * self.architecture.vocab
        if run.implementation == "megatron" or self.gathers:  # elsewhere the logits are put together before the loss
            size //= run.tensor
        elements = self.architecture.vocab * self.hidden // run.tensor
        logits = tape.op("logits", [n], [c * size], saves="in", term="logits", **self._trains(elements))
        product = tape.ops[-1]
        if trained and self.architecture.tied:  # autograd holds this gradient until that of the embedding is there to be added
            product.weight, product.leaves = 0, c * elements
        if self.architecture.family in SOFT_CAPS:
            logits = self._soft_cap(tape, logits, c * size)
        if run.loss == "chunked":
            if run.fused_kernels:  # the compiled loss keeps the logits, and fp32 is only within its kernels
                return self._loss(tape, logits, c * size, 0, "in")
            return self._loss(tape, logits, 4 * size, 4 * size // run.chunks, "out")
        wide = tape.op("to fp32", [logits], [4 * size], term="logits") if c < 4 else logits
        if run.shifted_copy:
            wide = tape.op("shift", [wide], [4 * size], term="logits")
        if run.loss == "fused":
            tape.op("cross_entropy", [wide], [4], saves="in", term="logits", overwrites=True)
            return tape
        # on slices of the vocabulary it is written out, and exp has a copy of its own (torch/distributed/tensor/parallel/loss.py)
        exp = 4 * size if self.gathers else 0
        log = tape.op("log_softmax", [wide], [4 * size], saves="out", term="logits", forward_temp=exp, backward_temp=exp)
        # the model's forward still has the logits in hand, and the labels are kept
        labels = Tensor(8 * self.tokens, "logits", False)
        tape.op("nll_loss", [log], [4], term="logits", saves=[labels], holds=(logits,))
        tape.ops[-1].outputs.append(labels)
        if trained and run.loss == "chunked_head" and run.chunks > 1:
            # the gradient of the head's weight is there from the first chunk on, and each chunk's is added to it
            tape.ops[-1].leaves = c * elements
            if self.architecture.tied:  # what is left of the sum for the embedding is left by the operation that backward does next
                tape.ops[tape.ops.index(product) - 1].leaves = c * elements
            product.leaves = -c * elements
        return tape

    def _loss(self, tape: Tape, logits: Tensor, size: int, chunk: int, saves: str) -> Tape:
        """A loss over chunks of tokens, each of which passes through fp32: `size` bytes in all, `chunk` of one of them.

        In backward a chunk has two fp32 gradients at once, beside what is kept of all; in the end its own and the others'
        gradients in the logits' dtype are put together, when nothing is kept any more.
        """
        if saves == "in":
            tape.op("chunked loss", [logits], [4], saves=[logits], term="logits")
            return tape
        kept = Tensor(size, "logits", False)
        passing = max(2 * chunk, 2 * logits.size - size) - logits.size  # beside the gradient of all logits, made at once here
        cast = chunk if self.c < 4 else 0
        tape.op("chunked loss", [logits], [4], saves=[kept], term="logits", forward_temp=cast, backward_temp=passing)
        tape.ops[-1].outputs.append(kept)
        return tape
