"""A SoME language model for transformers, in one file that needs torch and transformers alone.

Experts that were never trained are in no file. Each follows from (seed, layer, expert): it is made when it is first
chosen, and refused where its checksum is not the saved one. The keys stand still here; what moves them is some-moe, the
laboratory that trains such models.

Shapes: B rows, T positions, N = B·T tokens, E experts, K chosen, D model width, F hidden width, H heads.
"""

import math
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

WORD = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
ZEROS = 16  # sparse experts: where the zeros are has hash streams of its own
MATRICES = {"up": 0, "up_bias": 1, "down": 2, "down_bias": 3}
SIZES = {"vocab_size": 8192, "d_model": 384, "num_layers": 8, "num_heads": 8}  # of a config that says nothing
CHUNK = 1 << 16  # words hashed at a time: they stay in a cache, and leave no large holes in memory
# How the text before decides on branches: what a word says counts so much less at the next one, no sum is lower, and a
# branch of a smaller share does not run.
FADES, FLOOR, LEAST = 0.98, -4.0, 0.01
CURE = "get the folder anew, or use the config that was saved with it"


# --- numbers from a counter: the same bits on every device ---------------------------------------------------------


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def mix_int(word: int) -> int:
    word ^= word >> 16
    word = word * FIRST & WORD
    word ^= word >> 15
    word = word * SECOND & WORD
    return word ^ word >> 16


def derive_key(*parts: int) -> tuple[int, int]:
    """Two signed 32-bit key words from any integers of up to 64 bits."""
    first, second = 0x9E3779B9, 0x85EBCA6B
    for part in parts:
        for word in (part & WORD, part >> 32 & WORD):
            first = mix_int(first ^ word)
            second = mix_int((second + first) & WORD) ^ word
    return signed(mix_int(first)), signed(mix_int(second ^ first))


def mix_(words: Tensor) -> Tensor:
    words ^= (words >> 16) & 0xFFFF
    words *= FIRST
    words ^= (words >> 15) & 0x1FFFF
    words *= signed(SECOND)
    words ^= (words >> 16) & 0xFFFF
    return words


def hash_words(counter: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    return mix_(mix_(counter ^ first) + second)


def fill(out: Tensor, key: tuple[int, ...], matrix: str, bound: float, sparsity: float) -> None:
    """Fill one expert's matrix; key: (seed, layer, expert)."""
    values, zeros = (derive_key(*key, MATRICES[matrix] + stream) for stream in (0, ZEROS))
    factor = torch.tensor(bound / (1 - sparsity) ** 0.5 * 2.0**-24, dtype=torch.float32, device=out.device)
    flat = out.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        counter = torch.arange(start, start + len(part), dtype=torch.int32, device=out.device)
        odd = (hash_words(counter, *values) >> 8 & 0xFFFFFF) * 2 + (1 - 2**24)
        number = odd.to(torch.float32) * factor
        if sparsity:
            number = number * ((hash_words(counter, *zeros) >> 8 & 0xFFFFFF) >= round(sparsity * 2**24))
        part.copy_(number)


def add_bits(tensors: list[Tensor], expert: int) -> int:
    """What one expert adds to its layer's checksum, a 64-bit word with its sign."""
    total = 0
    for place, tensor in enumerate(tensors):
        bits = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        for start in range(0, len(bits), CHUNK):
            part = bits[start : start + CHUNK].to(torch.int64)
            begin = start + expert * tensor.numel() + (place << 40)
            weight = torch.arange(begin, begin + len(part), device=part.device)
            weight *= -0x61C8864680B583EB
            weight ^= weight >> 29
            total += int((weight * 2 + 1).mul_(part).sum())
    total &= 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >= 1 << 63 else total


# --- the config -----------------------------------------------------------------------------------------------------


class SomeConfig(PreTrainedConfig):  # type: ignore[misc]
    """`model` and `gravity` are the settings of the run; `checksums` are those of the experts made from the seed.

    made_experts: how many of each layer are made from `model["expert_seed"]`; the others are in the file (None: all
    that were never trained). kept_experts: how many of them each layer keeps once they are made (None: all).
    num_base: of a grown run, how many experts of each layer are its base's; the others are added to what those say.
    looking: where the experts of its branches that look back at the text before a token begin and end. voices: of each
    branch, where any has an update of the head, how many experts and of what rank.
    """

    model_type = "some_moe"

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        gravity: dict[str, Any] | None = None,
        seed: int = 0,
        made_experts: int | None = None,
        checksums: list[str] | None = None,
        kept_experts: int | None = None,
        num_base: int | None = None,
        looking: list[tuple[int, int]] | None = None,
        voices: list[tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.model, self.gravity, self.seed = SIZES | (model or {}), dict(gravity or {}), seed
        self.made_experts, self.checksums, self.kept_experts = made_experts, checksums, kept_experts
        self.num_base, self.looking = num_base, [tuple(place) for place in looking or ()]
        self.voices = [tuple(sizes) for sizes in voices or ()]
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    @vocab_size.setter
    def vocab_size(self, number: int) -> None:
        self.model["vocab_size"] = number

    @property
    def hidden_size(self) -> int:
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.model["num_layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["num_heads"])

    def count_made(self, num_experts: int) -> int:
        """How many of a layer's experts are made from the seed."""
        if self.made_experts is not None:
            return min(self.made_experts, num_experts)
        is_saved = self.model["trainability"] == "full" or self.model["init_method"] == "orthogonal"
        return 0 if is_saved else num_experts


# --- layers; their names are those of the checkpoint ----------------------------------------------------------------


class Linear(nn.Linear):
    """Computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Computes in float32 or better."""

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def activate(pre: Tensor, width: int) -> Tensor:
    """GELU of pre-activations (…, width), or SwiGLU of gates and what they let through (…, 2·width)."""
    if pre.shape[-1] == width:
        return F.gelu(pre)
    gate, linear = pre.chunk(2, dim=-1)
    return F.silu(gate) * linear


class Network(nn.Module):
    """d → hidden → d with GELU, or gated; without a hidden width, d → d."""

    def __init__(self, d: int, hidden: int = 0, activation: str = "gelu") -> None:
        super().__init__()
        high = 2 * hidden if activation == "swiglu" else hidden
        self.expand = Linear(d, high) if hidden else None
        self.project = Linear(hidden or d, d)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.expand is None else activate(self.expand(x), self.project.in_features)
        y: Tensor = self.project(hidden)
        return y


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Library(nn.Module):
    """The experts of a layer: the first are made from the seed, the others are held in stacks."""

    sums: Tensor  # (E,) int64, of those that are made: what each adds to the checksum; 0: not known yet

    def __init__(self, config: SomeConfig, layer: int, *, experts: int, width: int, has_studies: bool = True) -> None:
        super().__init__()
        m, d = config.model, config.hidden_size
        self.layer, self.seed, self.num_experts, self.num_base = layer, m["expert_seed"], experts, config.num_base
        self.init_method, self.sparsity = m["init_method"], m["sparsity"] if m["init_method"] == "sparse" else 0.0
        self.dtype = torch.bfloat16 if m["expert_dtype"] == "bfloat16" else torch.float32
        self.num_made, self.num_kept = config.count_made(experts), config.kept_experts
        if self.num_kept is not None and not (isinstance(self.num_kept, int) and self.num_kept > 0):
            raise ValueError(f"kept_experts {self.num_kept!r} is no number of experts; use 1 or more, or None for all")
        self.made: dict[int, list[Tensor]] = {}  # no buffers: from_pretrained would fill them with anything
        high = 2 * width if m.get("activation") == "swiglu" else width
        self.width = width
        self.shapes: dict[str, tuple[int, ...]] = {
            "up": (high, d), "up_bias": (high,), "down": (d, width), "down_bias": (d,)
        }  # fmt: skip
        is_shared = has_studies and m["shared_down"]
        if is_shared:
            del self.shapes["down"], self.shapes["down_bias"]
        if self.num_made:
            self.register_buffer("sums", torch.zeros(self.num_made, dtype=torch.int64))
        for name, shape in self.shapes.items() if experts > self.num_made else ():
            stack = torch.zeros(experts - self.num_made, *shape, dtype=self.dtype)
            if m["trainability"] == "full":
                self.register_parameter(name, nn.Parameter(stack))
            else:
                self.register_buffer(name, stack)
        self.has_lora = has_studies and m["trainability"] == "lora"
        if self.has_lora:
            rank = m["lora_rank"]
            shapes = {"up_in": (rank, d), "up_out": (high, rank), "down_in": (rank, width), "down_out": (d, rank)}
            for name, pair in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(experts, *pair)))
        self.gain = nn.Parameter(torch.ones(experts, width)) if has_studies and m["gains"] else None
        self.shared = Linear(width, d) if is_shared else None

    def _apply(self, fn: Any, recurse: bool = True) -> "Library":
        """What `.to()` and `.cuda()` call: experts are made again where they are needed."""
        self.made.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def make(self, expert: int, device: torch.device) -> list[Tensor]:
        """The matrices of one expert, from the seed; refused where they are not what was saved."""
        d = self.shapes["up"][1]
        tensors = []
        # What is made in inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad():
            for name, shape in self.shapes.items():
                out = torch.empty(shape, dtype=self.dtype, device=device)
                sparsity = 0.0 if name.endswith("_bias") else self.sparsity
                bound = 1 / math.sqrt(d if name.startswith("up") else self.width)
                fill(out, (self.seed, self.layer, expert), name, bound, sparsity)
                tensors.append(out)
            found, saved = add_bits(tensors, expert), int(self.sums[expert])
            if saved == 0:
                self.sums[expert] = found
            elif saved != found:
                raise ValueError(
                    f"expert {expert} of layer {self.layer}, made from expert_seed {self.seed}, is not the one that "
                    f"this model was trained with; {CURE}"
                )
        return tensors

    def make_all(self, x: Tensor) -> None:
        """Make every expert now, for inputs like x."""
        for expert in range(self.num_made):
            self.weights(expert, x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def weights(self, expert: int, x: Tensor) -> dict[str, Tensor]:
        """The matrices of one expert, in the type of x."""
        if expert >= self.num_made:
            held = {name: getattr(self, name)[expert - self.num_made] for name in self.shapes}
        else:
            tensors = self.made.pop(expert, None)
            narrow = min(self.dtype, x.dtype, key=lambda dtype: dtype.itemsize)
            if tensors is None or tensors[0].dtype.itemsize < narrow.itemsize:
                tensors = [tensor.to(narrow) for tensor in self.make(expert, x.device)]
            self.made[expert] = tensors  # the last used stands last
            if self.num_kept is not None and len(self.made) > self.num_kept:
                del self.made[next(iter(self.made))]
            held = dict(zip(self.shapes, tensors, strict=True))
        held = {name: tensor.to(x.dtype) for name, tensor in held.items()}
        if self.has_lora:
            for name in ("up", "down"):
                low, high = (getattr(self, f"{name}_{side}")[expert].to(x.dtype) for side in ("in", "out"))
                held[name] = held[name] + high @ low
        return held

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        w = self.weights(expert, x)
        hidden = activate(F.linear(x, w["up"], w["up_bias"]), self.width)
        if self.gain is not None:
            hidden = hidden * self.gain[expert].to(x.dtype)
        return F.linear(hidden, w["down"], w["down_bias"]) if "down" in w else hidden

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # which experts run is known as it runs
    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """x (N, D), experts (N, K) int64, gates (N, K) → the gated sum (N, D) of the experts' outputs."""
        y = x.new_zeros(len(x), self.shapes["up"][0] if self.shared is not None else x.shape[1])
        for expert in torch.unique(experts).tolist():
            token, slot = ((experts == expert) & (gates != 0)).nonzero(as_tuple=True)
            part = gates[token, slot, None].to(x.dtype) * self.run_expert(expert, x[token])
            y = y.index_add(0, token, part.to(y.dtype))
        return y if self.shared is None else self.shared(y)

    def check(self, checksum: str | None) -> None:
        """Refuse a file that does not fit the config, and a seed that does not make the file's experts."""
        if not self.num_made or self.sums.is_meta:
            return
        found = f"{int(self.sums.sum()) & 0xFFFFFFFFFFFFFFFF:016x}"
        if found != checksum:
            raise ValueError(
                f"the experts of layer {self.layer} have the checksum {checksum} in config.json, but {found} in the "
                f"file of weights; {CURE}"
            )
        if int(self.sums[0]) == 0:
            raise ValueError(f"the file of weights knows no checksum of the experts of layer {self.layer}; {CURE}")
        self.make(0, self.sums.device)


def keep_wide(fn: Any) -> Any:
    """What `.to()` does to tensors, but for making them narrower than float32."""

    def move(old: Tensor) -> Tensor:
        new: Tensor = fn(old)
        is_narrow = new.is_floating_point() and new.itemsize < 4
        return old.to(new.device, torch.float32) if is_narrow else new

    return move


class KeyState(nn.Module):
    """The keys, and what gravity remembers of them, in float32 whatever the rest is in."""

    keys: Tensor  # (E, D)
    bias: Tensor  # (E,)
    smoothed: Tensor | None  # (E, D)
    query_mean: Tensor | None  # (D,)

    def __init__(self, config: SomeConfig) -> None:
        super().__init__()
        m = config.model
        experts, d = m["num_experts"], m["d_model"]
        keys = torch.zeros(experts, d)
        if m["router"] == "learned":
            self.keys = nn.Parameter(keys)
        else:
            self.register_buffer("keys", keys)
        for name in ("window", "total", "patience", "respawns"):
            self.register_buffer(name, torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("window_last", torch.full((experts,), -1))
        self.register_buffer("window_steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("usage", torch.ones(experts))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("smoothed", torch.zeros(experts, d) if config.gravity.get("key_ema") else None)
        self.register_buffer("query_mean", torch.zeros(d) if m["center_queries"] else None)

    def _apply(self, fn: Any, recurse: bool = True) -> "KeyState":
        super()._apply(keep_wide(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class Temperature(nn.Module):
    def __init__(self, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.low, self.high = bounds
        self.place = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        temperature: Tensor = self.low * (self.high / self.low) ** self.place.sigmoid()
        return temperature


class KeyRouter(nn.Module):
    """The K experts whose keys score highest against the query."""

    def __init__(self, config: SomeConfig) -> None:
        super().__init__()
        self.m, self.num_base, self.looking = config.model, config.num_base, config.looking
        self.state = KeyState(config)
        bounds = tuple(self.m["temperature_bounds"])
        self.temperature = Temperature(bounds) if self.m["learn_temperature"] else None

    def forward(self, query: Tensor, shares: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries (B, T, D) → experts (B, T, K) and their gates. shares (B, T, E): see `LookingBack`."""
        m, state = self.m, self.state
        with torch.autocast(query.device.type, enabled=False):
            query = widen(query)
            if state.query_mean is not None:
                query = query - state.query_mean.to(query.dtype)
            keys = (state.keys if state.smoothed is None else state.smoothed).to(query.dtype)
            if m["score"] == "cosine":
                query, keys = m["cosine_scale"] * F.normalize(query, dim=-1), F.normalize(keys, dim=-1)
            scores = query @ keys.T
            biased = scores + state.bias  # decides who is chosen, and never how much the chosen count
            if shares is not None:
                known = biased.masked_fill(biased.isinf(), 0)
                span = known.amax(-1, keepdim=True) - known.amin(-1, keepdim=True) + 1  # lifts any above all others
                for first, end in self.looking:
                    biased[..., first:end] += torch.where(shares[..., first:end] > 0, span, -span)
            experts = biased.topk(m["top_k"], dim=-1).indices
            scores = scores / (m["temperature"] if self.temperature is None else self.temperature())
            gates = self.weigh(scores, experts)
            if self.num_base is None:
                return experts, gates
            # A branch is added to what the base says: the base's own choice runs for every token, in K places more.
            base = biased[..., : self.num_base].topk(m["top_k"], dim=-1).indices
            is_new = experts >= self.num_base
            if shares is not None:
                gates = gates * shares.gather(-1, experts).to(gates.dtype)
            gates = torch.cat([self.weigh(scores, base), gates * is_new], -1)
            return torch.cat([base, experts.where(is_new, base)], -1), gates

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        if self.m["top_k"] == 1:
            return scores.softmax(-1).gather(-1, experts)
        return scores.gather(-1, experts).softmax(-1)


class LookingBack(nn.Module):
    """How much each expert's output counts at a token, by the text before it, in every layer alike.

    Each word says something for each of G branches, in log-odds. The sum of it so far, older words counting less and no
    sum below a floor, makes each branch's share. What was said is kept beside the keys and values of attention, so that
    whatever happens to these happens to it.
    """

    words: Tensor  # (V, G) what each word says
    prior: Tensor  # (G,) what speaks for each branch before a word is read

    def __init__(self, config: SomeConfig) -> None:
        super().__init__()
        self.place, self.looking = config.num_hidden_layers, config.looking
        self.num_experts = config.model["num_experts"]
        self.register_buffer("words", torch.zeros(config.vocab_size, len(config.looking)))
        self.register_buffer("prior", torch.zeros(len(config.looking)))

    def _apply(self, fn: Any, recurse: bool = True) -> "LookingBack":
        super()._apply(keep_wide(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, ids: Tensor | None, past: int | Tensor, cache: Any) -> Tensor:
        """ids (B, T) → (B, T, E): 1 for experts of base and branches that do not look back."""
        if ids is None:
            raise ValueError("this model chooses experts by the words before, too; give input_ids, not inputs_embeds")
        known = ids < len(self.words)  # words that were added to the vocabulary say nothing
        said = self.words[ids.where(known, 0)] * known[..., None]
        so_far = said if cache is None else self.remember(said[:, None], cache)[:, 0]
        own = past + torch.arange(ids.shape[1], device=ids.device)
        odds = self.add_up(so_far).index_select(1, own) + self.prior
        shares = F.pad(odds, (1, 0)).softmax(-1)[..., 1:]
        largest = shares == shares.amax(-1, keepdim=True)
        shares = torch.where(largest & (shares >= LEAST), shares, 0.0)
        found = shares.new_ones(*ids.shape, self.num_experts)
        for number, (first, end) in enumerate(self.looking):
            found[..., first:end] = shares[..., number, None]
        return found

    def add_up(self, said: Tensor) -> Tensor:
        """The sums (B, slots, G): each max(fades·sum + said, floor) of the one before, in log2(slots) rounds."""
        fades, floors, shift = torch.full_like(said, FADES), torch.full_like(said, FLOOR), 1
        while shift < said.shape[1]:
            fade, add, floor = (part[:, shift:] for part in (fades, said, floors))
            joined = (
                fade * fades[:, :-shift],
                fade * said[:, :-shift] + add,
                torch.maximum(fade * floors[:, :-shift] + add, floor),
            )
            fades, said, floors = (
                torch.cat([whole[:, :shift], part], 1)
                for whole, part in zip((fades, said, floors), joined, strict=True)
            )
            shift *= 2
        return torch.maximum(said, floors)

    def remember(self, said: Tensor, cache: Any) -> Tensor:
        """All that was said (B, 1, slots, G), as one layer more of the cache."""
        if len(cache.layers) == self.place:  # one that was made for so many layers
            last = cache.layers[-1]
            room = {"max_cache_len": last.max_cache_len} if last.is_compileable else {}
            cache.layers.append(type(last)(**room))
        found: Tensor = cache.update(said, said, self.place)[0]
        return found


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:  # noqa: ARG002
        return y * self.scale.to(y.dtype)


class SharedExpert(nn.Module):
    def __init__(self, d: int, width: int, activation: str) -> None:
        super().__init__()
        self.ffn = Network(d, width, activation)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        shared: Tensor = self.ffn(x)
        return y + shared


class Voices(nn.Module):
    """What branches add to the logits, as far as the last layer's gates are theirs.

    The base says what it says; where branches serve a token, what they say, by a head with their low-rank updates, is
    mixed with that: as probabilities, by their share.
    """

    def __init__(self, config: SomeConfig) -> None:
        super().__init__()
        assert config.num_base is not None
        sizes, ranks = zip(*config.voices, strict=True)
        self.ends, self.ranks = [config.num_base], list(ranks)
        for size in sizes[:-1]:
            self.ends.append(self.ends[-1] + size)
        self.head_in = nn.Parameter(torch.zeros(sum(ranks), config.hidden_size))
        self.head_out = nn.Parameter(torch.zeros(config.vocab_size, sum(ranks)))

    def forward(self, x: Tensor, logits: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """x (B, T, D), what the head makes of it (B, T, V), experts and gates (B, T, K) → (B, T, V) to add."""
        ranks = torch.tensor(self.ranks, device=x.device)
        whose = (experts[..., None] >= torch.tensor(self.ends, device=x.device)).sum(-1, keepdim=True)
        numbers = torch.arange(1, len(self.ends) + 1, device=x.device)
        shares = ((whose == numbers) * gates.detach()[..., None]).sum(-2)
        share = (shares * (ranks > 0)).sum(-1, keepdim=True).clamp(max=1)
        parts = (shares / share.clamp(min=1e-6)).repeat_interleave(ranks, -1)
        update = F.linear(F.linear(x, self.head_in.to(x.dtype)) * parts.to(x.dtype), self.head_out.to(x.dtype))
        # Words that were added to the vocabulary have no update.
        base, update = widen(logits), widen(F.pad(update, (0, logits.shape[-1] - update.shape[-1])))
        louder = update + base.logsumexp(-1, keepdim=True) - (base + update).logsumexp(-1, keepdim=True)
        return torch.logaddexp(torch.log1p(-share), share.log() + louder).to(logits.dtype)


class Routed(NamedTuple):
    """What a layer found: the query that the next one may ask for, and whom it chose, experts and gates (B, T, K)."""

    query: Tensor | None
    experts: Tensor
    gates: Tensor


class SomeLayer(nn.Module):
    """A feed-forward layer whose experts are found by content, or by a hash of the token."""

    def __init__(self, config: SomeConfig, layer: int) -> None:
        super().__init__()
        self.m, self.layer = config.model, layer
        m, d = self.m, config.hidden_size
        self.library = Library(config, layer, experts=m["num_experts"], width=m["d_ffn"])
        by_hash = m["router"] == "hash"
        hidden = m["query_hidden"] or 2 * d if m["query"] == "mlp" else 0
        self.query = None if by_hash else Network(d, hidden)
        self.key_router = None if by_hash else KeyRouter(config)
        self.studies = nn.ModuleList()
        if m["output_scale"]:
            self.studies.append(Scale())
        if m["shared_expert"]:
            self.studies.append(SharedExpert(d, m["shared_expert"], m.get("activation", "gelu")))

    def hash_tokens(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """No content: a token's experts follow from its id, and all count the same."""
        k, experts = self.m["top_k"], self.m["num_experts"]
        first, second = derive_key(self.m["expert_seed"], self.layer)
        token = hash_words(ids.to(torch.int32), first, second)[..., None]
        every = torch.arange(experts, dtype=torch.int32, device=ids.device).expand(*ids.shape, experts)
        chosen = hash_words(every, token, second).topk(k, dim=-1).indices
        return chosen, torch.full(chosen.shape, 1 / k, device=ids.device)

    def forward(
        self, x: Tensor, ids: Tensor | None, before: Tensor | None, shares: Tensor | None
    ) -> tuple[Tensor, Routed]:
        """x (B, T, D) → y (B, T, D), and what the next layer and the head ask for; before: the last layer's query."""
        query = address = None
        if self.query is None or self.key_router is None:
            if ids is None:
                raise ValueError("this model chooses experts by token id; give input_ids, not inputs_embeds")
            experts, gates = self.hash_tokens(ids)
        else:
            query = address = self.query(x)
            if self.m["grounding"] and before is not None:
                address = query + self.m["grounding"] * before
            experts, gates = self.key_router(address, shares)
        y = self.library(x.flatten(0, 1), experts.flatten(0, 1), gates.flatten(0, 1)).view_as(x)
        for study in self.studies:
            y = study(y, x)
        if self.m["query_residual"] and query is not None:
            y = y + query
        return y, Routed(address, experts, gates)


class FrozenDense(nn.Module):
    """A library of one expert that every token uses."""

    def __init__(self, config: SomeConfig, layer: int) -> None:
        super().__init__()
        self.library = Library(config, layer, experts=1, width=config.model["dense_width"], has_studies=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.library.run_expert(0, x)
        return y


class Place(NamedTuple):
    """Where the tokens stand, and who may see whom."""

    rotation: tuple[Tensor, Tensor] | None  # cosines and sines, each (B or 1, 1, T, D/H/2)
    mask: Tensor | None  # (B or 1, H or 1, T, slots): bool, or additive
    is_causal: bool  # plain causal attention without a mask


class Attention(nn.Module):
    def __init__(self, config: SomeConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.num_heads, d = layer, config.num_attention_heads, config.hidden_size
        self.query, self.key, self.value, self.out = (Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor, place: Place, cache: Any) -> Tensor:
        maps = (self.query, self.key, self.value)
        q, k, v = (each(x).view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for each in maps)
        if place.rotation is not None:
            cos, sin = (part.to(x.dtype) for part in place.rotation)
            q, k = (
                torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
                for left, right in (q.chunk(2, -1), k.chunk(2, -1))
            )
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mask = place.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=place.is_causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, config: SomeConfig, layer: int) -> None:
        super().__init__()
        m, d = config.model, config.hidden_size
        self.norm_first = m["norm"] == "pre"
        self.attention_norm, self.ffn_norm = LayerNorm(d), LayerNorm(d)
        self.attention = Attention(config, layer)
        kinds = {"some": SomeLayer, "frozen_dense": FrozenDense}
        kind = kinds.get(m["ffn"])
        self.ffn: Any = (
            Network(d, m["dense_width"], m.get("activation", "gelu")) if kind is None else kind(config, layer)
        )

    def feed(self, x: Tensor, told: tuple[Tensor | None, ...]) -> tuple[Tensor, Routed | None]:
        found: tuple[Tensor, Routed | None]
        found = self.ffn(x, *told) if isinstance(self.ffn, SomeLayer) else (self.ffn(x), None)
        return found

    def forward(
        self, x: Tensor, told: tuple[Tensor | None, ...], place: Place, cache: Any
    ) -> tuple[Tensor, Routed | None]:
        """told: ids, the query of the layer before, and the shares of experts by the text before."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), place, cache)
            y, routed = self.feed(self.ffn_norm(x), told)
            return x + y, routed
        x = self.attention_norm(x + self.attention(x, place, cache))
        y, routed = self.feed(x, told)
        return self.ffn_norm(x + y), routed


class Trunk(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, config: SomeConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.head = Linear(config.hidden_size, config.vocab_size)


# --- positions --------------------------------------------------------------------------------------------------------


def find_angles(positions: Tensor, width: int) -> Tensor:
    """Angles (B or 1, T, width/2) of wavelengths from 2π to 2π·10,000."""
    inverse = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    return positions[..., None].float() * inverse


def find_positions(time: int, past: int | Tensor, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Positions (B or 1, T) of the new tokens: padding on the left counts none."""
    if attention_mask is None or attention_mask.dim() != 2:
        return (past + torch.arange(time, device=device))[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -time:]


def count_slots(cache: Any, needed: int | Tensor) -> int:
    """How many keys attention will get: a cache of fixed length gives all of its own."""
    layers = getattr(cache, "layers", None)
    return int((getattr(layers[0], "max_cache_len", None) if layers else None) or needed)


def find_place(
    config: SomeConfig, positions: Tensor, past: int | Tensor, slots: int, attention_mask: Tensor | None
) -> Place:
    """Who sees whom, of so many slots, the first `past` of which are taken. A cache of fixed length has that number on
    the device, where it is left: compiled code would break off to ask for it."""
    m, time, device = config.model, positions.shape[1], positions.device
    rotation = None
    if m["positions"] == "rope":
        angle = find_angles(positions, m["d_model"] // m["num_heads"])[:, None]
        rotation = angle.cos(), angle.sin()
    is_padded = attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.all()))
    is_whole = isinstance(past, int) and slots == past + time and (past == 0 or time == 1)
    if m["positions"] != "alibi" and not is_padded and is_whole:
        return Place(rotation, None, time > 1)
    slot = torch.arange(slots, device=device)
    own = (past + slot[:time])[:, None]
    visible = (slot <= own)[None, None]
    if attention_mask is not None and attention_mask.dim() == 4:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    elif attention_mask is not None:
        real = attention_mask.bool()
        real = F.pad(real, (max(0, int(past) + time - real.shape[1]), 0), value=True)[:, :slots]
        real = F.pad(real, (0, slots - real.shape[1]), value=False)
        # Padding sees itself, lest it be no number.
        visible = visible & real[:, None, None, :] | (slot == own)[None, None]
    if m["positions"] != "alibi":
        return Place(rotation, visible, False)
    head = torch.arange(1, m["num_heads"] + 1, device=device, dtype=torch.float32)
    slopes = torch.exp2(-8.0 * head / m["num_heads"])[None, :, None, None]
    return Place(None, (-slopes * (own - slot)).masked_fill(~visible, -torch.inf), False)


# --- the model --------------------------------------------------------------------------------------------------------


class SomeForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model of SoME layers."""

    config_class = SomeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 - as transformers has it
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["state", "looking_back"]  # noqa: RUF012 - keys move by less than half precision can tell

    def __init__(self, config: SomeConfig) -> None:
        super().__init__(config)
        self.model: Any = self.build(config)
        self.looking_back = LookingBack(config) if config.looking else None
        self.voices = Voices(config) if config.voices else None
        self.post_init()

    def build(self, config: SomeConfig) -> nn.Module:
        return Trunk(config)

    @property
    def libraries(self) -> list[Library]:
        """Every expert library, in order of depth."""
        return [module for module in self.modules() if isinstance(module, Library)]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; a folder whose weights are not all there, or not what they were, is refused."""
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind, words in (("missing_keys", "has no {}"), ("unexpected_keys", "has {}, which the config does not")):
            for name in sorted(map(str, info[kind])):
                raise ValueError(f"the file of weights {words.format(name)}; {CURE}")
        model.check_experts()
        return (model, info) if wants_info else model

    def check_experts(self) -> None:
        """Refuse experts that are not those of the saved model: the sums of all, and one of each layer made again."""
        told = self.config.checksums if isinstance(self.config.checksums, list) else []
        for library, checksum in zip_longest((one for one in self.libraries if one.num_made), told):
            if library is None:
                raise ValueError(f"config.json has the checksums of {len(told)} layers, which is too many; {CURE}")
            library.check(checksum)

    def make_experts(self) -> "SomeForCausalLM":
        """Make every expert now that would be made when it is first chosen."""
        for library in self.libraries:
            if library.num_made:
                library.make_all(torch.empty(0, dtype=self.dtype, device=library.sums.device))
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it; the config gets the checksums of all experts."""
        for library in self.libraries:
            for expert in (library.sums == 0).nonzero().flatten().tolist() if library.num_made else ():
                library.make(expert, library.sums.device)
        made = [library for library in self.libraries if library.num_made]
        sums = [int(library.sums.sum()) & 0xFFFFFFFFFFFFFFFF for library in made]
        self.config.checksums = [f"{total:016x}" for total in sums]
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A model that is made anew; what comes from a file is never touched."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(getattr(tensor, "_is_hf_initialized", False) for tensor in own):
            return
        if isinstance(module, nn.Linear | nn.LayerNorm):
            super()._init_weights(module)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, self.config.model["embedding_std"])
        elif isinstance(module, KeyState):
            module.keys.copy_(F.normalize(torch.randn_like(module.keys), dim=-1))
            if module.smoothed is not None:
                module.smoothed.copy_(module.keys)
        elif isinstance(module, Library):
            for name, parameter in module.named_parameters(recurse=False):
                if name in module.shapes or name.endswith("_in"):
                    parameter.uniform_(-1, 1).div_(math.sqrt(parameter.shape[-1]))

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.embedding
        return embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.model.head
        return head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    def run_blocks(
        self,
        x: Tensor,
        ids: Tensor | None,
        place: Place,
        cache: Any,
        counted: Tensor | None,  # noqa: ARG002
        shares: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], Tensor | None, Routed | None]:
        """x (B, T, D) through all blocks: the result, what went into each, what the layers add to the loss, and whom
        the last one chose."""
        inputs: list[Tensor] = []
        routed: Routed | None = None
        for block in self.model.blocks:
            inputs.append(x)
            x, routed = block(x, (ids, None if routed is None else routed.query, shares), place, cache)
        return x, inputs, None, routed

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As other causal models of transformers. Padding may stand on either side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x = self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past, time = 0 if past_key_values is None else past_key_values.get_seq_length(), x.shape[1]
        if position_ids is None:
            position_ids = find_positions(time, past, attention_mask, x.device)
        slots = count_slots(past_key_values, past + time)
        place = find_place(self.config, position_ids, past, slots, attention_mask)
        if self.config.model["positions"] == "sinusoidal":
            angle = find_angles(position_ids, self.config.hidden_size)
            x = x + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(x.dtype)
        is_flat = attention_mask is not None and attention_mask.dim() == 2
        counted = attention_mask[:, -time:].bool() if is_flat and attention_mask is not None else None
        shares = None if self.looking_back is None else self.looking_back(input_ids, past, past_key_values)
        x, inputs, added, routed = self.run_blocks(x, input_ids, place, past_key_values, counted, shares)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(x[:, keep])
        if self.voices is not None and routed is not None:
            logits = logits + self.voices(x[:, keep], logits, routed.experts[:, keep], routed.gates[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if added is not None:
                whole = kwargs.get("num_items_in_batch")  # of all micro-batches of a step
                share = 1.0 if whole is None else (labels != -100).sum() / whole
                loss = loss + share * added
        states = (*inputs, x) if output_hidden_states else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=states)
