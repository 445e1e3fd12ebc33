"""Prediction accuracy: how far predicted step times were from measured ones, over all recorded steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from statistics import median, quantiles

from autopar.costs.history import Record
from autopar.plan.display import shown


@dataclass(frozen=True)
class Distribution:
    """How the relative errors of some predictions are distributed."""

    n: int  # predictions
    median: float  # of |predicted - measured| / measured
    p95: float  # of the same: 95% of the predictions are at most this far off (interpolated linearly)
    worst: float  # of the same
    signed_median: float  # of predicted / measured - 1: above 0 where steps were faster than predicted

    @classmethod
    def of(cls, records: Iterable[Record]) -> Distribution:
        """Raises ValueError for no records. O(n log n)."""
        return cls.of_errors(record.error for record in records)

    @classmethod
    def of_errors(cls, relative: Iterable[float]) -> Distribution:
        """Of values of predicted / measured - 1. Raises ValueError for none."""
        signed = list(relative)
        if not signed:
            raise ValueError("no records, no distribution")
        errors = sorted(map(abs, signed))
        p95 = quantiles(errors, n=20, method="inclusive")[-1] if len(errors) > 1 else errors[0]
        return cls(len(errors), median(errors), p95, errors[-1], median(signed))


@dataclass(frozen=True)
class Accuracy:
    """Predicted against measured steps; `print(accuracy)` shows a table."""

    records: tuple[Record, ...]  # oldest first
    since: datetime | None = None  # older records were left out
    kind: str | None = None  # records on device kinds that do not contain this were left out

    @classmethod
    def of(cls, records: Iterable[Record], *, since: datetime | None = None, kind: str | None = None) -> Accuracy:
        """The accuracy of the records measured at or after `since` (without a zone: local time) on a device kind that
        contains `kind`, ignoring case."""
        start = since.astimezone() if since is not None else None
        chosen = tuple(
            record
            for record in records
            if (start is None or record.time >= start)
            and (kind is None or any(kind.lower() in name.lower() for name in record.device_kinds))
        )
        return cls(chosen, since, kind)

    @property
    def overall(self) -> Distribution | None:
        """None without records."""
        return Distribution.of(self.records) if self.records else None

    @property
    def by_kind(self) -> Mapping[str, Distribution]:
        """By the kinds of the devices that a plan used."""
        return self._by(lambda record: record.kind)

    @property
    def by_source(self) -> Mapping[str, Distribution]:
        """By what ran the steps: "compare", "tune" or "train_step"."""
        return self._by(lambda record: record.source)

    @property
    def by_schedule(self) -> Mapping[str, Distribution]:
        """By schedule; plans of one stage and one micro-batch, which have none, are "one device"."""
        return self._by(_schedule)

    @property
    def by_costs(self) -> Mapping[str, Distribution]:
        """By the costs behind the predictions: "measured" or "estimated"."""
        return self._by(lambda record: record.costs)

    def __str__(self) -> str:
        return shown(self)

    def to_json(self) -> str:
        """The distributions, relative errors as fractions, and every record in seconds and bytes."""
        whole = self.overall
        data = {
            "overall": asdict(whole) if whole is not None else None,
            **{
                f"by_{what}": {name: asdict(one) for name, one in groups.items()}
                for what, groups in self.groups.items()
            },
            "records": [json.loads(record.to_json()) for record in self.records],
        }
        return json.dumps(data, indent=1)

    @property
    def groups(self) -> dict[str, Mapping[str, Distribution]]:
        return {
            "kind": self.by_kind,
            "source": self.by_source,
            "schedule": self.by_schedule,
            "costs": self.by_costs,
        }

    def _by(self, key: Callable[[Record], str]) -> dict[str, Distribution]:
        groups: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            groups[key(record)].append(record)
        return {name: Distribution.of(groups[name]) for name in sorted(groups)}


def _schedule(record: Record) -> str:
    return "one device" if record.devices == 1 and record.n_microbatches == 1 else record.schedule
