"""Made-up results."""

from tests.shared.results import make_up as make_up
