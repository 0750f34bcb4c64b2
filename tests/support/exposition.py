"""A scrape as a mapping from series to value, read by prometheus_client's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Exposition(dict[str, float]):
    """Series, written as `name{label="value"}` without the daemon's own label, to value."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.families = list(text_string_to_metric_families(text))
        self.labels: dict[str, set[str]] = {}
        """By the name of a sample: all labels that it was seen with."""
        for family in self.families:
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                inner = ",".join(
                    f'{key}="{value}"' for key, value in sample.labels.items() if key != "daemon"
                )
                self[sample.name + (f"{{{inner}}}" if inner else "")] = sample.value

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's values by one of its labels."""
        return {
            sample.labels[label]: sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and label in sample.labels
        }
