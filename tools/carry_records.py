#!/usr/bin/env python3
"""Gives tuning records the version of today's kernels, if those are the kernels that were measured.

    python3 tools/carry_records.py --measured OLD/bin/flce --today build/bin/flce records/shipped/*.json

The version is a digest of the templates and of the generator without their comments: another name makes a new one, and records of the old
one then stand behind (`flce explain` says "with kernels of another version"). Measuring takes a GPU and hours; this takes two builds and
NVRTC. It compiles every candidate of the records that has times with both, once for each layer and set of tiles, and compares the kernels:
the machine code and everything else in the cubin that the device or a launch goes by (registers, shared memory, parameters, constants).
Records of a layer whose kernels are the same get the version that `flce info` of --today names; the others are listed, stay as they are,
and the exit code is 1. Nothing is run on a device.

--except KERNEL: this kernel may differ from the measured one, where all of a layer's candidates of a path (cuda_sm90a, ...) have one and
the same. It takes as long under each of them, and which tiles are best does not depend on it; the times in the record are those with the
measured one.

--only-compare compares the kernels of any records' plans and writes nothing. It shows that a change of names or folders has changed no
kernel, also where the records are of a version that neither build has.

--work keeps the kernels, so that a second run goes on where the first one was stopped.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ARCHITECTURE = "h100"  # records of sm_90a devices differ in no kernel
# Sections that may differ: names, notes about the compiler's command, and debuggers' input.
NOT_COMPARED = {"", ".shstrtab", ".strtab", ".symtab", ".debug_frame", ".rel.debug_frame", ".rela.debug_frame", ".nv.callgraph"}
NOT_COMPARED |= {".note.nv.tkinfo", ".note.nv.cuinfo"}
# Constants have no memory that an instruction reads: they are part of the instructions.
NOT_COMPARED |= {".nv.global", ".nv.global.init", ".nv.constant4", ".rel.nv.constant4", ".rela.nv.constant4"}
# Attributes: place of the parameters, frame, least and most stack, registers.
BEGIN_WITH_A_SYMBOL = (0x0A, 0x11, 0x12, 0x23, 0x2F)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", required=True, help="flce of the version that the records have")
    parser.add_argument("--today", required=True, help="flce of the version that they are to get")
    parser.add_argument("--only-compare", action="store_true", help="records of any version; none is written")
    parser.add_argument("--except", dest="apart", metavar="KERNEL", help="a kernel that may differ, such as flce_prepare")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", help="a folder for the kernels (default: a temporary one)")
    parser.add_argument("records", nargs="+", type=pathlib.Path)
    return parser.parse_args()


def run(*command):
    environment = {**os.environ, "FLCE_NO_RECORDS": "1", "FLCE_CACHE_MAX_BYTES": "0", "FLCE_CACHE_PACKS": "", "FLCE_CACHE_REMOTE": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def sections(cubin):
    """Names and bytes of an ELF file's sections; the size of a section without bytes (shared memory)."""
    table = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name_at, kind, _, _, offset, length, *_ in headers:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        nothing = kind == 8
        yield name, str(length).encode() if nothing else cubin[offset : offset + length]


def fingerprint(path, apart):
    """Names of a cubin's kernels, a digest of their code, and one of the kernel `apart`, where the cubin has it."""
    digest, of_apart = hashlib.sha256(), hashlib.sha256()
    kernels = []
    found = sorted(sections(path.read_bytes()), key=lambda section: section[0])
    number = number_of(apart, dict(found)) if apart else None
    for name, contents in found:
        if name.startswith(".text."):
            kernels.append(name[len(".text.") :])
        if name in NOT_COMPARED:
            continue
        if name.startswith(".nv.info"):
            contents = without_symbols(contents, number)
        to = of_apart if apart and name.endswith(f".{apart}") else digest
        to.update(f"{name} {len(contents)}\n".encode() + contents)
    return tuple(sorted(kernels)), digest.hexdigest(), of_apart.hexdigest() if apart in kernels else None


def number_of(kernel, found):
    """Number of the symbol that is a kernel's name."""
    symbols, names = found[".symtab"], found[".strtab"]
    for number in range(len(symbols) // 24):
        name_at = struct.unpack_from("<I", symbols, 24 * number)[0]
        if names[name_at : names.index(b"\0", name_at)].decode() == kernel:
            return number
    return None


def without_symbols(info, apart):
    """Attributes of kernels; a symbol's number counts the names before it. Without those of the symbol number `apart`."""
    kept = b""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        length = 4 + (size if form == 4 else 0)
        value = info[at + 4 : at + length]
        of_symbol = attribute in BEGIN_WITH_A_SYMBOL
        if of_symbol and struct.unpack_from("<I", value)[0] == apart:
            at += length
            continue
        kept += info[at : at + 4] + (value[4:] if of_symbol else value)
        at += length
    return kept


def kernels_of(flce, spec, plans, cache, export, jobs, apart):
    def compile_one(plan):
        run(flce, "prewarm", "--spec", spec, "--device", ARCHITECTURE, "--plan", plan, "--cache-dir", cache, "--jobs", "1")

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, plans))
    run(flce, "cache", "export", export, "--cache-dir", cache)
    return {fingerprint(path, apart) for path in pathlib.Path(export).glob("*.cubin")}


def same_code(args, work, spec, plans):
    found = []
    for which, flce in (("measured", args.measured), ("today", args.today)):
        folder = work / which / hashlib.sha256(spec.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        found.append(kernels_of(flce, spec, plans, folder / "cache", folder / "kernels", args.jobs, args.apart))
    common = [{code for _, _, code in cubins if code} for cubins in found]
    paths = {plan.split(":")[0] for plan in plans}
    if any(len(codes) > len(paths) for codes in common):
        sys.exit(f"{spec}: tiles change {args.apart}, so that the best ones may hang on it: it is no kernel for --except")
    measured, today = ({(kernels, digest) for kernels, digest, _ in cubins} for cubins in found)
    different = sorted({name for kernels, _ in measured ^ today for name in kernels})
    verdict = "other " + ", ".join(different) if different else "the same"
    print(f"{spec}: {len(plans)} sets of tiles, {len(measured)} cubins, {verdict}", flush=True)
    return not different


def give_version(path, record, version):
    old = f'"kernel_version": "{record["kernel_version"]}"'
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{path}: no single {old}")
    path.write_text(text.replace(old, f'"kernel_version": "{version}"'))


def main():
    args = parse_arguments()
    version = json.loads(run(args.today, "info", "--json")).get("kernel_versions", {}).get("cuda")
    if version is None:
        sys.exit(f"{args.today} does not say the version of its kernels")
    layers = {}
    for path in args.records:
        try:
            record = json.loads(path.read_text())
            record["device"]["kind"], record["kernel_version"], record["spec"], record["candidates"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path} is no tuning record: {error}")
        if record["device"]["kind"] != "cuda":
            sys.exit(f"{path} is of a {record['device']['kind']}; machine code of GPUs is what can be compared here")
        if record["kernel_version"] == version and not args.only_compare:
            continue
        layers.setdefault(record["spec"], []).append((path, record))
    if not args.only_compare and len({record["kernel_version"] for records in layers.values() for _, record in records}) > 1:
        sys.exit("the records are of several versions; carry those of one at a time, with its program")
    carried = True
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(args.work or temporary)
        for spec, records in sorted(layers.items()):
            timed = {c["plan"] for _, record in records for c in record["candidates"] if any(c["times_ms"].values())}
            # Kernels are the same for any chunk and any scratch.
            tiles = {re.sub(r"chunk=\d+,scratch=\d+", "", plan): plan for plan in sorted(timed)}
            if not same_code(args, work, spec, sorted(tiles.values())):
                carried = False
                continue
            if not args.only_compare:
                for path, record in records:
                    give_version(path, record, version)
    sys.exit(0 if carried else 1)


if __name__ == "__main__":
    main()
