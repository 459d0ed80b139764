#!/usr/bin/env python3
"""Runs the GPU tests of test binaries, many processes at once, within a time: what a lent GPU machine is for.

    python3 tools/gpu_tests.py build/bin/test_matrix build/bin/test_properties --seconds 300 --out run.json
    python3 tools/gpu_tests.py build/bin/test_* --first softcap everything --out run.json
    python3 tools/gpu_tests.py build/bin/test_* --after run.json --out rest.json

Most of a test's time is NVRTC's and the fp64 oracle's, on a core of its own: a process a core shares the GPU. Cases run in the binaries'
order, those whose names have a word of --first before them. --after leaves out what passed in earlier runs, so that a run which the time
cut off goes on in the next; --out is written every 15 seconds. Ends with a table for tests/gpu-results.md, and with 1 if a case failed or a
process died, also after its cases had passed; what such processes printed is in the file beside --out that ends in .failures. The level is
nightly where FLCE_TEST_LEVEL says nothing else. Needs only Python and the binaries.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

# A case of these takes minutes: a process each.
LONG = ("Candidates", "LargeShapes", "HugeShapes", "RandomSpecs")
EVERY_SECONDS = 15
RESULT = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+?\.\S+?)(?:,| |$)", re.MULTILINE)


def number(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: 1 or more")
    return value


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="+", type=pathlib.Path)
    parser.add_argument("--filter", default="*Gpu*", help="of Google Test (default: *Gpu*)")
    parser.add_argument("--first", nargs="+", default=[], metavar="WORD", help="cases with this in their name come first")
    parser.add_argument("--after", nargs="+", default=[], type=pathlib.Path, metavar="FILE", help="--out of runs before")
    parser.add_argument("--seconds", type=float, default=540, help="then what still runs is ended (default: 540)")
    parser.add_argument("--workers", type=number, default=os.cpu_count() or 1, help="processes at once (default: one a core)")
    parser.add_argument("--gpus", type=number, default=1, help="GPUs to use: each process gets the next one (default: 1)")
    parser.add_argument("--chunk", type=number, default=4, help="cases a process (default: 4)")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="results by case, as JSON")
    return parser.parse_args()


def cases_of(binary, pattern):
    try:
        command = [binary, "--gtest_list_tests", f"--gtest_filter={pattern}"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"{binary} cannot be run: {error.strerror}")
    if listed.returncode != 0:
        sys.exit(f"{binary} does not list its cases: exit code {listed.returncode}\n{listed.stderr or listed.stdout}")
    suite = ""
    for line in listed.stdout.splitlines():
        name = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = name if name.endswith(".") else ""
        elif suite:
            yield suite + name


def passed_before(path):
    try:
        return {name for name, state in json.loads(path.read_text())["results"].items() if state == "OK"}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        sys.exit(f"{path} is no --out of an earlier run: {error!r}")


def key(binary, name):
    """Name of a case with its binary: binaries may have cases of one name."""
    return f"{binary.name}:{name}"


def chunks(cases, size):
    """(binary, names) for each process, in the order of the cases."""
    at = 0
    while at < len(cases):
        binary, name = cases[at]
        most = 1 if any(word in name for word in LONG) else size
        names = [name]
        at += 1
        while len(names) < most and at < len(cases) and cases[at][0] == binary and not any(word in cases[at][1] for word in LONG):
            names.append(cases[at][1])
            at += 1
        yield binary, names


class Run:
    """Processes that run, and their results."""

    def __init__(self, cases, args):
        self.end = time.monotonic() + args.seconds
        self.cases = [key(*case) for case in cases]
        self.gpus, self.out, self.failures = args.gpus, args.out, args.out.with_suffix(".failures")
        self.results = {}
        self.deaths = 0
        self._begun = 0
        self._running = set()
        self._lock = threading.Lock()
        self.failures.unlink(missing_ok=True)

    def late(self):
        return time.monotonic() >= self.end

    def process(self, binary, names):
        with self._lock:
            if self.late():
                return
            gpu, self._begun = self._begun % self.gpus, self._begun + 1
            environment = {"FLCE_TEST_LEVEL": "nightly", **os.environ}
            if self.gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
            command = [binary, "--gtest_filter=" + ":".join(names)]
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            process = subprocess.Popen(command, env=environment, **both)
            self._running.add(process)
        text = process.communicate()[0]
        with self._lock:
            self._running.discard(process)
            self._keep(binary, names, text, process.returncode)

    def _keep(self, binary, names, text, code):
        found = {name: state for state, name in RESULT.findall(text)}
        ended = self.late() and code == -signal.SIGTERM
        states = {name: found.get(name, "cut off" if ended else "died") for name in names}
        self.results |= {key(binary, name): state for name, state in states.items()}
        failed = "FAILED" in states.values()
        died = "died" in states.values() or (code != 0 and not failed and not ended)
        self.deaths += died
        if died or failed:
            with self.failures.open("a") as file:
                file.write(f"== {binary.name}, exit code {code}: {' '.join(names)}\n{text[-20000:]}\n")
        if died:
            print(f"{binary.name} ended with {code}: {' '.join(names)}", flush=True)

    def watch(self):
        """Tells progress, saves results, and ends processes that run too long."""
        told = time.monotonic()
        while not self.late():
            time.sleep(0.2)
            if time.monotonic() - told > EVERY_SECONDS:
                told = time.monotonic()
                print(f"{len(self.results)} of {len(self.cases)}, {self.count('FAILED')} failed", file=sys.stderr, flush=True)
                self.save()
        with self._lock:
            for process in self._running:
                process.terminate()

    def count(self, state):
        return sum(each == state for each in list(self.results.values()))

    def left(self):
        return [case for case in self.cases if case not in self.results]

    def save(self):
        with self._lock:
            text = json.dumps({"results": self.results, "not_begun": self.left()}, indent=0)
            whole = self.out.with_name(self.out.name + ".part")
            whole.write_text(text + "\n")
            whole.replace(self.out)


def table(results):
    suites = {}
    for name, state in results.items():
        counts = suites.setdefault(name.split(".")[0], {})
        counts[state] = counts.get(state, 0) + 1
    print("| suite | passed | failed | skipped | died | cut off |\n|---|---|---|---|---|---|")
    for suite, counts in sorted(suites.items()):
        print("| " + " | ".join([suite, *(str(counts.get(state, 0)) for state in ("OK", "FAILED", "SKIPPED", "died", "cut off"))]) + " |")


def main():
    args = parse_arguments()
    before = set().union(*map(passed_before, args.after))
    binaries = [binary.resolve() for binary in args.binaries]
    cases = [(binary, name) for binary in binaries for name in cases_of(binary, args.filter) if key(binary, name) not in before]
    cases.sort(key=lambda case: not any(word in case[1] for word in args.first))
    if not cases and before:
        print("no case is left")
        return
    if not cases:
        sys.exit(f"no case is named {args.filter}")
    run = Run(cases, args)
    try:
        run.save()
    except OSError as error:
        sys.exit(f"{args.out} cannot be written: {error.strerror}")
    threading.Thread(target=run.watch, daemon=True).start()
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for done in [pool.submit(run.process, *chunk) for chunk in chunks(cases, args.chunk)]:
            done.result()
    run.save()
    table(run.results)
    left = run.left()
    print(f"{len(left)} cases were not begun" if left else "every case was begun")
    for name, state in run.results.items():
        if state in ("FAILED", "died"):
            print(f"{state}: {name}")
    sys.exit(1 if run.count("FAILED") or run.deaths else 0)


if __name__ == "__main__":
    main()
