"""The paths that stay out of compiled graphs: their loops' bounds are data, and tracing would compile every batch anew.

To import this is to load torch's compiler, which takes longer than many a command: see `may_be_compiled`.
"""

import torch

from some_moe.experts import MixExperts, cpu, reference

mix_cpu: MixExperts = torch.compiler.disable(cpu.mix_experts)  # type: ignore[no-untyped-call]
mix_reference: MixExperts = torch.compiler.disable(reference.mix_experts)  # type: ignore[no-untyped-call]
