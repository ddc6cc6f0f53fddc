"""The manifest: what every committed part holds, so that going on need not read the parts.

It is a cache. The parts are the truth, and what is missing here, or differs in size, is read again.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict

from pipeline import failpoints, storage
from pipeline.errors import DamagedPartError
from pipeline.parts import PartReport, list_parts, part_uri, read_report
from pipeline.shards import Shard

_SAVE_SECONDS = 5.0


class Manifest:
    """Reports of parts by their shards, in OUT/manifest.json."""

    def __init__(self, output: str) -> None:
        """Read it; one that is damaged or missing is empty."""
        self._output = output
        self._uri = storage.join(output, "manifest.json")
        self._reports = self._load()
        self._saved = time.monotonic()

    def find_parts(self, shards: Iterable[Shard]) -> tuple[dict[str, PartReport], list[str]]:
        """Look which of the shards have a part.

        Returns:
            A report of each part that is there and whole, and what is wrong with others.
        """
        there = list_parts(self._output)
        found: dict[str, PartReport] = {}
        damaged: list[str] = []
        for shard in shards:
            name, num_bytes = shard.name, there.get(shard.name)
            if num_bytes is None:
                continue
            report = self._reports.get(name)
            if report is None or report.num_bytes != num_bytes:
                try:
                    report = read_report(self._output, name)
                except DamagedPartError as error:
                    damaged.append(str(error))
                    continue
            if report.num_rows != shard.num_rows:
                uri = part_uri(self._output, name)
                rows = f"{report.num_rows} rows instead of {shard.num_rows}"
                damaged.append(f"{uri}: is damaged (it has {rows})")
                continue
            found[name] = report
        self._reports = dict(found)
        return found, damaged

    def keep(self, reports: dict[str, PartReport]) -> None:
        """Hold these reports and no others."""
        self._reports = dict(reports)

    def read_again(self, shards: Iterable[str]) -> None:
        """Take in what the parts of these shards are, where two workers may have written them."""
        for shard in self._reports.keys() & set(shards):
            self._reports[shard] = read_report(self._output, shard)

    def get(self, shard: str) -> PartReport | None:
        """What is known of a part."""
        return self._reports.get(shard)

    def add(self, report: PartReport) -> None:
        """Take in a report; it is on disk a few seconds later, or after `save`."""
        self._reports[report.shard] = report
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write OUT/manifest.json."""
        reports = [asdict(self._reports[shard]) for shard in sorted(self._reports)]
        storage.write_atomic(self._uri, json.dumps({"parts": reports}).encode())
        failpoints.reach("manifest")
        self._saved = time.monotonic()

    def _load(self) -> dict[str, PartReport]:
        content = storage.read_bytes(self._uri)
        if content is None:
            return {}
        try:
            reports = [PartReport.from_dict(raw) for raw in json.loads(content)["parts"]]
        except (ValueError, KeyError, TypeError):
            return {}
        return {report.shard: report for report in reports}


def has_failed_rows(report: PartReport, shard: Shard) -> bool:
    """Whether a part has rows that were tried and failed; those that could not run are none."""
    return report.num_errors > shard.num_refused
