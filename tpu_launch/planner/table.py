"""Writes plans as tables and as JSON."""

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tpu_launch.planner.figures import Plan, written


def show(plans: Sequence[Plan], currency: str, console: Console) -> None:
    """Prints one table per plan."""
    for plan in plans:
        table = Table(title=plan.title, title_justify="left", show_header=False)
        table.add_column("figure")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("note", style="dim")
        for heading, lines in plan.sections.items():
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
            for line in lines:
                table.add_row(f"  {line.name}", written(line, currency), line.note)
        console.print(table)
        for name, value in plan.bindings.items():
            console.print(f"chosen: {name} = {value}", highlight=False)
        for hint in plan.hints:
            console.print(f"note: {hint}", highlight=False)
        for problem in plan.problems:
            console.print(f"[bold]does not fit:[/bold] {problem}", highlight=False)


def as_json(plans: Sequence[Plan], currency: str) -> str:
    """Returns all figures as JSON, in base units: bytes, FLOP, seconds."""
    described = []
    for plan in plans:
        sections = {
            heading: {
                line.name: {
                    "value": line.value,
                    "unit": line.unit.value,
                    "note": line.note,
                }
                for line in lines
            }
            for heading, lines in plan.sections.items()
        }
        described.append({**dataclasses.asdict(plan), "sections": sections})
    return json.dumps({"currency": currency, "plans": described}, indent=1)
