"""A slice run by run: what is known, done and open, with what each costs."""

from tools.studies.costs import estimate
from tools.studies.plan import Plan, Study
from tools.studies.records import Records


def describe_runs(plan: Plan, study: Study, records: Records) -> list[str]:
    lines = [study.words]
    for arm in study.arms:
        known = plan.known_runs(arm, records)
        more = plan.count_runs(arm) - len(known)
        for run in known:
            cost = estimate(run)
            state = "done" if run.record in records else "open"
            size = f"{cost.steps:,} steps, {cost.gpu_seconds:.0f} s, {cost.used_bytes / 2**30:.0f} GiB"
            lines.append(f"{state}  {run.name:<52} {arm.experiment:<28} {size}")
        if more > 0:
            lines.append(f"later {arm.name}: {more} more, once what is open is done")
    return lines
