"""The verdict table: every statement beside what was measured of it."""

from collections.abc import Mapping
from typing import Any

from some_moe.config import ConfigError
from tools.studies.outcomes import Outcome, Outcomes

NOT_YET = "not measured yet"
WITHIN = 0.02  # nats: what counts as equal where a statement says nothing
KINDS = ("ahead", "equal", "faster")
PAGES = {
    "results": "../results.md", "depth": "depth.md", "gravity": "gravity.md", "adapt": "adaptation.md",
    "grow": "grow.md",
}  # fmt: skip


def judge(statement: Mapping[str, Any], outcomes: Outcomes) -> tuple[str, str]:
    """(what was measured, verdict) of a statement."""
    kind = next((one for one in KINDS if one in statement), None)
    written = str(statement.get("verdict", ""))
    if kind is None:
        page = str(statement["page"])
        # Other tools make the pages of other studies, sooner or later: this one shall not change with them.
        return f"[{page}]({PAGES[page]})" if page in PAGES else f"`{page}.md`", written or NOT_YET
    one, other = (find(outcomes, key) for key in statement[kind][:2])
    if kind == "faster":
        measured, verdict = judge_speed(one, other, float(statement[kind][2]))
    else:
        measured, verdict = judge_loss(one, other, kind, float(statement.get("within", WITHIN)))
    return measured, written or verdict


def judge_on_laptop(statement: Mapping[str, Any], outcomes: Outcomes) -> str:
    """The same of the study `laptop`, in a few words; empty where it does not ask that."""
    kind = next((one for one in ("ahead", "equal") if one in statement), None)
    if kind is None:
        return ""
    names = statement.get("laptop") or [key.split("/")[-1] for key in statement[kind]]
    one, other = (outcomes.found.get(f"laptop/{name}") for name in names)
    if one is None or other is None:
        return ""
    measured, verdict = judge_loss(one, other, kind, float(statement.get("within", WITHIN)))
    return verdict if verdict == NOT_YET else f"{measured.split(' nats')[0]}: {verdict}"


def find(outcomes: Outcomes, key: str) -> Outcome:
    if key not in outcomes.found:
        raise ConfigError(f"words.yaml names the arm {key!r}, which the plan has not; write STUDY/ARM")
    return outcomes[key]


def judge_loss(one: Outcome, other: Outcome, kind: str, within: float) -> tuple[str, str]:
    gap = one.minus(other)
    if gap is None:
        return "–", NOT_YET
    open_yet = "" if one.is_whole and other.is_whole else " (runs are open)"
    measured = f"{gap.signed()} nats, {gap.seeds} seed{'s' * (gap.seeds > 1)}{open_yet}"
    if gap.half is None:
        return measured, "one seed: a lead"
    if kind == "ahead":
        if not gap.is_apart:
            return measured, "not told apart"
        return measured, "holds" if gap.mean < 0 else "does not hold: the other way round"
    if abs(gap.mean) + gap.half <= within:
        return measured, f"holds (within {within:g})"
    if abs(gap.mean) - gap.half > within:
        return measured, f"does not hold (more than {within:g})"
    return measured, f"open: the interval reaches over {within:g}"


def judge_speed(one: Outcome, other: Outcome, share: float) -> tuple[str, str]:
    ours, theirs = one.step_ms, other.step_ms
    if ours is None or theirs is None:
        return "–", NOT_YET
    saved = 1 - ours / theirs
    measured = f"{ours:.2f} and {theirs:.2f} ms a step, {100 * saved:+.1f} % saved, one run each"
    return measured, "holds" if saved >= share else "does not hold"
