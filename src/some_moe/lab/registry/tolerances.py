"""How far a measured loss may lie from the published one and still count as the same result."""

from dataclasses import dataclass
from decimal import Decimal

from some_moe.lab.registry.records import Experiment


@dataclass(frozen=True)
class Tolerance:
    """A distance in nats, or a share of the published loss."""

    nats: Decimal = Decimal(0)
    share: Decimal = Decimal(0)

    def allow(self, published: Decimal) -> Decimal:
        """Return the greatest difference that still counts as agreement, in nats."""
        return self.nats + self.share * published

    def __str__(self) -> str:
        return f"±{self.share:.0%}".replace("%", " %") if self.share else f"±{self.nats} nats"


# The V report leaves gravity's settings open, so its runs are given more room. The MVP report and those from v5 on
# state too little, or figures too low to be true: there is nothing to be met there.
TOLERANCES = {
    "V (v3)": Tolerance(share=Decimal("0.10")),
    "A (v4)": Tolerance(nats=Decimal("0.06")),
    "B (v4)": Tolerance(nats=Decimal("0.06")),
}


def find_tolerance(experiment: Experiment) -> Tolerance | None:
    """Return the tolerance of an experiment's series, or None where none is set."""
    return TOLERANCES.get(experiment.series)
