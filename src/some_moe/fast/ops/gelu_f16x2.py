"""GELU and its slope for the ends of products on Hopper, two numbers at a time, in the machine's own instructions.

A tile's ending is thousands of instructions without a loop; on an H200 they took 2.5 cycles each, whichever they were
(it seems that fetching them is what takes the time). So what counts is how few there are.

Half precision does two numbers at once, and is finer than the bf16 that is stored: hidden activations are off by 1.7e-3
in norm, where rounding to bf16 alone makes 1.66e-3, and torch's GELU of a product in bf16 2.6e-3. Beyond ±65,504, the
largest half, a sum counts as that.
"""

import struct

# Φ(x) ≈ ½ + ½ tanh(x·(A + B·x²)), fitted so that x·Φ(x) is off by at most 2.7e-4, and its slope by 9e-4.
A, B = 0.80015708, 0.03470089
LARGEST_SQUARE = 20.0  # beyond it Φ is 0 or 1; larger ones would overflow
STEPS, ZERO = 200, 26  # of a slope's byte, as in `fused_kernels.pack_slope`
WHOLE = 1024  # from here on halves are whole numbers, and their low byte counts from it

CONSTANTS = {
    "a": A, "b": B, "b3": 3 * B, "largest": LARGEST_SQUARE, "half": 0.5, "two": 2.0, "mtwo": -2.0, "steps": STEPS,
    "origin": WHOLE + ZERO,
}  # fmt: skip

# Two numbers, {low} and {high}, on top of two halves {bias}; {n} is the pair's number.
ONE_PAIR = """
cvt.rn.satfinite.f16x2.f32 x{n}, {high}, {low};
add.rn.f16x2 x{n}, x{n}, {bias};
mul.rn.f16x2 square{n}, x{n}, x{n};
min.f16x2 square{n}, square{n}, largest;
fma.rn.f16x2 t{n}, square{n}, b, a;
mul.rn.f16x2 t{n}, x{n}, t{n};
tanh.approx.f16x2 t{n}, t{n};
fma.rn.f16x2 cdf{n}, t{n}, half, half;
mul.rn.f16x2 t{n}, x{n}, cdf{n};
mov.b32 {{left{n}, right{n}}}, t{n};
cvt.f32.f16 wide_left{n}, left{n};
cvt.f32.f16 wide_right{n}, right{n};
cvt.rn.bf16x2.f32 {hidden}, wide_right{n}, wide_left{n};
fma.rn.f16x2 slope{n}, square{n}, b3, a;
fma.rn.f16x2 t{n}, cdf{n}, mtwo, two;
mul.rn.f16x2 t{n}, t{n}, cdf{n};
mul.rn.f16x2 slope{n}, slope{n}, t{n};
fma.rn.f16x2 slope{n}, x{n}, slope{n}, cdf{n};
fma.rn.f16x2 slope{n}, slope{n}, steps, origin;
"""


def _twice(number: float) -> str:
    """A half, in both halves of a register."""
    return f"0x{struct.pack('>e', number).hex() * 2}"


def _assemble() -> str:
    """Four sums in float32 and four biases in half precision → four activations in bf16 and four slopes in bytes."""
    first = ONE_PAIR.format(n=0, low="$3", high="$4", bias="$7", hidden="$0").strip().split("\n")
    second = ONE_PAIR.format(n=1, low="$5", high="$6", bias="$8", hidden="$1").strip().split("\n")
    packed = [f"{name}{n}" for name in ("x", "square", "t", "cdf", "slope") for n in (0, 1)]
    lines = [
        f".reg .b32 {', '.join((*packed, *CONSTANTS))};",
        ".reg .b16 left0, right0, left1, right1;",
        ".reg .f32 wide_left0, wide_right0, wide_left1, wide_right1;",
        *(f"mov.b32 {name}, {_twice(value)};" for name, value in CONSTANTS.items()),
        *(line for pair in zip(first, second, strict=True) for line in pair),
        "prmt.b32 $2, slope0, slope1, 0x6420;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


ASSEMBLY = _assemble()
OPERANDS = "=r,=r,=r,f,f,f,f,r,r"
AT_ONCE = 4
