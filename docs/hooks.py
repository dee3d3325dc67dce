"""What MkDocs does beside the pages: it writes the command line's page from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line's page."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def command_line() -> str:
    """Every command with its options, as Markdown."""
    import click
    from typer.main import get_command

    from layoutopt.cli import app

    lines = [
        "# Command line",
        "",
        "Every command takes `--json` where it prints; bad input is one sentence on standard",
    ]
    lines += ["error and exit code 2.", ""]

    def describe(command: Any, words: str) -> None:
        if hasattr(command, "commands"):
            for name, below in sorted(command.commands.items()):
                describe(below, f"{words} {name}")
            return
        context = click.Context(command, info_name=words)
        lines.extend([f"## {words}", "", " ".join((command.help or "").split()), ""])
        usage = " ".join(command.collect_usage_pieces(context))
        lines.extend(["```text", f"{words} {usage}", "```", ""])
        rows = [row for parameter in command.get_params(context) if (row := parameter.get_help_record(context))]
        if rows:
            lines.extend(["| option | |", "|---|---|"])
            lines.extend(f"| `{plain(names)}` | {plain(text)} |" for names, text in rows)
            lines.append("")

    describe(get_command(app), "layoutopt")
    return "\n".join(lines)


def plain(text: str) -> str:
    """A table's cell."""
    return " ".join(re.sub(r"([|<])", r"\\\1", text).split())
