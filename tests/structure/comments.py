"""Fails on a comment whose first word makes a reader look for the words before it (CONTRIBUTING.md, "Style").

comments.py [SOURCE_DIR]
"""

import pathlib
import re
import sys

ROOMS = "templates generator cache records runtime autotune prewarm cli python tests benchmarks examples demo cmake tools".split()
TOP_FILES = ["CMakeLists.txt"]
REFUSED = re.compile(r"(of|that|what|those|this one|the same|whose|which|so|likewise|as|but)(?![\w-])", re.IGNORECASE)
C_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
# Strings first, since // within one is no comment. A ' between digits separates them.
C_TOKEN = re.compile(
    r'R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    r"|(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)",
    re.DOTALL,
)
PYTHON_TOKEN = re.compile(
    r'"""(?P<text>(?:\\.|[^\\])*?)"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(?P<comment>#[^\n]*)',
    re.DOTALL,
)
HASH_COMMENT = re.compile(r"""^((?:[^"'#]|"[^"]*"|'[^']*'|(?<!\s)#)*?)(?<!\S)#(?!!)""")


def first_lines(comments):
    """Takes (line, column, whole, text), drops continuations, and gives (line, text) of what is left.

    A comment continues the one in the line above if it has its line to itself and that one does too, or begins in the same column.
    """
    line_above, column_above, whole_above = -1, -1, False
    for line, column, whole, text in comments:
        continues = whole and line == line_above + 1 and (whole_above or column == column_above)
        if not continues:
            yield line, text
        # Lines below a comment behind code continue it as long as they keep its column.
        line_above, column_above, whole_above = line, column, whole and not (continues and not whole_above)


def c_comments(text):
    line, counted_to = 1, 0
    for match in C_TOKEN.finditer(text):
        comment = match["line"] or match["block"]
        if not comment:
            continue
        line += text.count("\n", counted_to, match.start())
        counted_to = match.start()
        begin = text.rfind("\n", 0, match.start()) + 1
        yield line, match.start() - begin, not text[begin : match.start()].strip(), re.sub(r"^[/*!<\s]+", "", comment)


def python_comments(text):
    """Comments, and docstrings: strings in three quotes that begin a file or follow a line's colon."""
    line, counted_to, code_ends_in = 1, 0, ":"
    for match in PYTHON_TOKEN.finditer(text):
        line += text.count("\n", counted_to, match.start())
        between = text[counted_to : match.start()].strip()
        code_ends_in = between[-1:] or code_ends_in
        counted_to = match.end()
        begin = text.rfind("\n", 0, match.start()) + 1
        whole = not text[begin : match.start()].strip()
        if match["comment"]:
            yield line, match.start() - begin, whole, match["comment"].lstrip("#:! ")
        else:
            if match["text"] and whole and code_ends_in == ":":
                yield line, -1, False, match["text"].lstrip()
            code_ends_in = "string"
        line += match[0].count("\n")


def hash_comments(text):
    for number, line in enumerate(text.splitlines(), 1):
        if match := HASH_COMMENT.match(line):
            yield number, match.end(1), not match[1].strip(), line[match.end() :].lstrip("# ")


def faults_of(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix in C_SUFFIXES:
        found = list(first_lines(c_comments(text)))
    elif path.suffix == ".py":
        found = list(first_lines(python_comments(text)))
    else:
        found = list(first_lines(hash_comments(text)))
    return [(line, comment.splitlines()[0]) for line, comment in found if REFUSED.match(comment)]


def sources(root):
    for room in ROOMS + TOP_FILES:
        for path in [root / room, *sorted((root / room).rglob("*"))]:
            known = path.suffix in C_SUFFIXES | {".py", ".cmake", ".sh"} or path.name == "CMakeLists.txt"
            if known and path.is_file():
                yield path


def main(root):
    read, refused = 0, []
    for path in sources(root):
        read += 1
        refused += [f"{path.relative_to(root).as_posix()}:{line}: {comment}" for line, comment in faults_of(path)]
    if not read:
        sys.exit(f"no code below {root}")
    if refused:
        sys.exit("comments that do not begin with a noun or a verb:\n  " + "\n  ".join(refused))
    print(f"{read} files")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2])
