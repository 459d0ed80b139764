"""Shows that tools/slow_tests.py reads the times of all kinds of tests, and names a slow one, on a slow machine too."""

import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
LOG = """\
1/3 Testing: matrix.1of2
"matrix.1of2" start time: Nov 27 03:00 UTC
Output:
----------------------------------------------------------
[       OK ] Cpu/SmallShapes.Deep/bf16_plain (2500 ms)
[  FAILED  ] Cpu/SmallShapes.Many/bf16_plain, where GetParam() = (Cpu, bf16) ({many} ms)
[ FAILED  ] 1 test, listed below:
<end of output>
Test time =  30.00 sec
"matrix.1of2" end time: Nov 27 03:00 UTC
2/3 Testing: python.core
"python.core" start time: Nov 27 03:00 UTC
Output:
1.50s setup    python/tests/test_loss.py::test_loss[a b]
{loss}s call     python/tests/test_loss.py::test_loss[a b]
<end of output>
Test time =  31.00 sec
"python.core" end time: Nov 27 03:00 UTC
3/3 Testing: python.wheel
"python.wheel" start time: Nov 27 03:00 UTC
Test time =  {wheel} sec
"python.wheel" end time: Nov 27 03:00 UTC
"""


def run(many=3000, loss=4.0, wheel=5.0, total=300.0, level="quick"):
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        (tree / "Testing/Temporary").mkdir(parents=True)
        (tree / "Testing/Temporary/LastTest.log").write_text(LOG.format(many=many, loss=loss, wheel=wheel))
        (tree / "ctest.log").write_text(f"Total Test time (real) = {total} sec\n")
        command = [sys.executable, SOURCE / "tools/slow_tests.py", tree]
        return subprocess.run(command, env={**os.environ, "FLCE_TEST_LEVEL": level}, capture_output=True, text=True, check=True)


told = run().stdout
expected = [
    "5.5 python.core: python/tests/test_loss.py::test_loss[a b]",
    "5.0 python.wheel",
    "3.0 matrix: Cpu/SmallShapes.Many/bf16_plain",
    "2.5 matrix: Cpu/SmallShapes.Deep/bf16_plain",
]
assert [line.strip() for line in told.splitlines()[1:]] == expected, told
for fault, name in (
    ({"many": 21000}, "SmallShapes.Many/bf16_plain: 21 s is too long"),
    ({"loss": 19.5}, "test_loss[a b]: 21 s is too long"),
    ({"wheel": 20.5}, "python.wheel: 20 s is too long"),
    ({"many": 61000, "total": 1200.0}, "SmallShapes.Many/bf16_plain: 61 s is too long"),
):
    assert name in run(**fault).stdout, (fault, run(**fault))
    assert "too long" not in run(**fault, level="full").stdout
assert "too long" not in run(many=59000, total=1200.0).stdout, "a machine of half the speed"
