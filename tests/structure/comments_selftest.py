"""Shows that comments.py refuses a comment by file and line for its first word, and takes continuations, strings and other words."""

import pathlib
import subprocess
import sys
import tempfile

CHECK = pathlib.Path(__file__).with_name("comments.py")
sys.path.insert(0, str(CHECK.parent))
sys.dont_write_bytecode = True
import comments  # noqa: E402

SOUND_CPP = """\
// A tile
// of the logits, or
/// what is left of it.
int rows;  ///< rows of a tile, or
           ///< of the last one
int columns;
const char* address = "https://a.b/c"; const char* words = "// of a string"; const char* raw = R"(// of it)";
int many = 1'000'000;  // Offsets, sober: longer words.
/* Bits
   of a mask. */
"""
SOUND_PYTHON = '''\
#!/usr/bin/env python
"""Reads a file

of lines.
"""
# One line
# of two.
text = """of a string"""
other = "# of a string"
table = {"a": 1}


def lines():
    """Gives lines of a file."""
    return text  # lines
'''
SOUND_CMAKE = 'set(a "# of a string")\n# A target\n# of C++.\nset(b c#of)\n'


def refused(name, text):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        path.write_text(text)
        return [line for line, _ in comments.faults_of(path)]


for name, text in (("a.cuh", SOUND_CPP), ("a.py", SOUND_PYTHON), ("a.cmake", SOUND_CMAKE), ("a.sh", SOUND_CMAKE)):
    assert refused(name, text) == [], (name, refused(name, text))
WORDS = "Of those|that|what a tile has|Those|this one|The same|whose|which|so|Likewise|as above|but"
for words in WORDS.split("|"):
    for text in (f"// {words}\n", f"/// {words} is\n", f"int x;  ///< {words}\n", f"/* {words} */\n", f"int x = 1'0 /* {words} */;\n"):
        assert refused("a.hpp", "int a;\n" + text) == [2], text
    for text in (f"# {words}\n", f"x = 1  # {words}\n", f'def f():\n    """{words}\n\n    more"""\n'):
        assert refused("a.py", "# A file.\n\n" + text) == [text.startswith("def") + 3], text
    assert refused("a.py", f'"""{words}"""\n') == [1]
    for text in (f"# {words}\n", f'set(x "a b")  # {words}\n'):
        assert refused("CMakeLists.txt", "\n" + text) == [2], text
# Comments behind code count each; a comment that an empty line sets apart is another one.
assert refused("a.hpp", "int a;  ///< of one\nint b;  ///< of two\n") == [1, 2]
assert refused("a.hpp", "int a;  // rows\n// of a tile\n") == [2]
assert refused("a.hpp", "// Rows\n\n// of a tile\n") == [3]

with tempfile.TemporaryDirectory() as folder:
    tree = pathlib.Path(folder)
    for name, text in (("cache/a.cpp", "// A store.\n"), ("tools/a.py", "x = 1\n# Of a file.\n")):
        (tree / name).parent.mkdir()
        (tree / name).write_text(text)
    try:
        comments.main(tree)
        raise AssertionError("not refused")
    except SystemExit as end:
        assert "tools/a.py:2: Of a file." in str(end), end
    empty = subprocess.run([sys.executable, CHECK, tree / "cache"], capture_output=True, text=True, check=False)
    assert empty.returncode and "no code" in empty.stderr, empty
