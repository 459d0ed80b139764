"""The code blocks of README.md, CONTRIBUTING.md and docs/, as they stand there.

A block is fenced, with its language, or indented by four: commands, or a drawing where it is not plain ASCII. A block that cannot be run
says why on the line before it: `<!-- not run: needs two GPUs -->`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("python", "cpp", "sh", "json", "cmake", "dockerfile", "text")
COMMANDS = ("cmake", "flce", "flce-shard-checkpoint", "git", "make", "pip", "python", "python3")


@dataclass(frozen=True)
class Block:
    page: str  # its path from the root
    line: int  # number of the first line within it
    heading: str  # the nearest one above, without its #
    language: str
    text: str
    not_run: str | None  # the reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def language_of_indented(text: str) -> str:
    words = [word for word in text.split("\n")[0].split() if not re.match(r"[A-Z_]+=", word)]
    if words and words[0] in COMMANDS:
        return "sh"
    return "" if text.isascii() else "text"


def blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").split("\n")
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    heading, reason, at = "", None, 0
    while at < len(lines):
        line = lines[at]
        if title := re.match(r"#+ (.*)", line):
            heading = title[1]
        if mark := re.fullmatch(r"<!-- not run: (.+) -->", line):
            reason, at = mark[1], at + 1
            continue
        fence, indented = re.fullmatch(r"```(\w*)", line), line.startswith("    ") and (at == 0 or not lines[at - 1].strip())
        first = at + 1 if fence else at
        if fence:
            at = lines.index("```", first)
        elif indented:
            while "".join(lines[at : at + 1] if lines[at] else lines[at + 1 : at + 2]).startswith("    "):
                at += 1
        if fence or indented:
            text = "\n".join(text[0 if fence else 4 :] for text in lines[first:at])
            found.append(Block(name, first + 1, heading, fence[1] if fence else language_of_indented(text), text, reason))
        if line.strip():
            reason = None
        at += 0 if indented and not fence else 1
    return found


def only_block(page: Path, language: str) -> str:
    """The one block of that language on a page."""
    texts = [block.text for block in blocks(page) if block.language == language]
    if len(texts) != 1:
        raise SystemExit(f"{page} has {len(texts)} blocks of {language}, not one")
    return texts[0]
