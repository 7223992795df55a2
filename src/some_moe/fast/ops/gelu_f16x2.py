"""GELU and gelu′ in packed f16x2 arithmetic, as inline PTX, for the GEMM epilogues on Hopper.

A tile's epilogue is thousands of instructions without a loop; on an H200 they took 2.5 cycles each, whichever they were
(it seems to be bound by instruction fetch). So what counts is how few there are.

f16x2 does two elements an instruction, and is finer than the bf16 that is stored: hidden activations are off by 1.7e-3
in norm, where rounding to bf16 alone makes 1.66e-3, and torch's GELU of a bf16 GEMM 2.6e-3. Accumulators saturate at
±65,504, the largest f16.
"""

import struct

# Φ(x) ≈ ½ + ½ tanh(x·(A + B·x²)), fitted so that x·Φ(x) is off by at most 2.7e-4, and gelu′ by 9e-4.
A, B = 0.80015708, 0.03470089
MAX_SQUARE = 20.0  # beyond it Φ is 0 or 1; larger ones would overflow
INV_SCALE, ZERO_POINT = 200, 26  # of gelu′ in uint8, as in `tma_gemm.quantize_dgelu`
MAGIC = 1024  # from here on f16 are integers, and their low byte counts from it

CONSTANTS = {
    "a": A, "b": B, "b3": 3 * B, "max_square": MAX_SQUARE, "half": 0.5, "two": 2.0, "mtwo": -2.0,
    "inv_scale": INV_SCALE, "magic": MAGIC + ZERO_POINT,
}  # fmt: skip

# Two accumulators, {low} and {high}, plus an f16x2 {bias}; {n} is the pair's index.
PAIR_PTX = """
cvt.rn.satfinite.f16x2.f32 x{n}, {high}, {low};
add.rn.f16x2 x{n}, x{n}, {bias};
mul.rn.f16x2 square{n}, x{n}, x{n};
min.f16x2 square{n}, square{n}, max_square;
fma.rn.f16x2 t{n}, square{n}, b, a;
mul.rn.f16x2 t{n}, x{n}, t{n};
tanh.approx.f16x2 t{n}, t{n};
fma.rn.f16x2 cdf{n}, t{n}, half, half;
mul.rn.f16x2 t{n}, x{n}, cdf{n};
mov.b32 {{left{n}, right{n}}}, t{n};
cvt.f32.f16 wide_left{n}, left{n};
cvt.f32.f16 wide_right{n}, right{n};
cvt.rn.bf16x2.f32 {hidden}, wide_right{n}, wide_left{n};
fma.rn.f16x2 dgelu{n}, square{n}, b3, a;
fma.rn.f16x2 t{n}, cdf{n}, mtwo, two;
mul.rn.f16x2 t{n}, t{n}, cdf{n};
mul.rn.f16x2 dgelu{n}, dgelu{n}, t{n};
fma.rn.f16x2 dgelu{n}, x{n}, dgelu{n}, cdf{n};
fma.rn.f16x2 dgelu{n}, dgelu{n}, inv_scale, magic;
"""


def _f16x2(value: float) -> str:
    """An f16 in both halves of a 32-bit register."""
    return f"0x{struct.pack('>e', value).hex() * 2}"


def _make_ptx() -> str:
    """Four float32 accumulators and four f16 biases → four bf16 activations and four uint8 gelu′."""
    first = PAIR_PTX.format(n=0, low="$3", high="$4", bias="$7", hidden="$0").strip().split("\n")
    second = PAIR_PTX.format(n=1, low="$5", high="$6", bias="$8", hidden="$1").strip().split("\n")
    packed = [f"{name}{n}" for name in ("x", "square", "t", "cdf", "dgelu") for n in (0, 1)]
    lines = [
        f".reg .b32 {', '.join((*packed, *CONSTANTS))};",
        ".reg .b16 left0, right0, left1, right1;",
        ".reg .f32 wide_left0, wide_right0, wide_left1, wide_right1;",
        *(f"mov.b32 {name}, {_f16x2(value)};" for name, value in CONSTANTS.items()),
        *(line for pair in zip(first, second, strict=True) for line in pair),
        "prmt.b32 $2, dgelu0, dgelu1, 0x6420;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


PTX = _make_ptx()
CONSTRAINTS = "=r,=r,=r,f,f,f,f,r,r"
PACK = 4  # elements an inline_asm_elementwise call takes
