"""The report of a plan; `Plan` has this method."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from autopar.errors.names import with_checked_names
from autopar.plan.display import reported

if TYPE_CHECKING:
    from autopar.report.document import Report


class ReportKeywords(TypedDict, total=False):
    """The arguments of `Plan.report`."""

    samples_per_epoch: float | None
    price_per_device_hour: float | None
    currency: str
    search: bool
    command: str | None


class PlanReport:
    """A plan for people to look at."""

    @with_checked_names
    def report(
        self,
        *,
        samples_per_epoch: float | None = None,
        price_per_device_hour: float | None = None,
        currency: str = "$",
        search: bool = False,
        command: str | None = None,
    ) -> Report:
        """The plan as a `Report`: what it is, what a step takes and holds, why, and how sure that is.

        `print(report)` shows text, a notebook shows a page, and `report.save("plan.html")` writes one HTML file.

        Args:
            samples_per_epoch: samples of the data set, for the time of an epoch. Without, for models with token inputs,
                the time of 1T tokens is shown, or of fewer where that takes more than ten years.
            price_per_device_hour: for the price of that time on all devices offered, in `currency`.
            search: search again for what each limit costs and what more memory would gain, and price the plan on
                faster and slower networks of its cluster. Each of them takes about as long as planning did. Without,
                everything comes from the plan's own numbers.
            command: the command or program that made the plan, to be shown with it.

        Raises: InputError for an unknown name, and for a size or a price that is not a finite number above 0.
        """
        found: Report = reported(
            self,
            samples_per_epoch=samples_per_epoch,
            price_per_device_hour=price_per_device_hour,
            currency=currency,
            search=search,
            command=command,
        )
        return found

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()
