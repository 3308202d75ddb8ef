"""Checks of the source tree that need no compiler: who includes whom, how long files are, where systems are told apart.

usage: check_house.py      prints each breach as FILE:LINE: SENTENCE; exit code 1 when there is one
"""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Arrows run one way (docs/protocol.md and README: "the house"): each room with the rooms that it may name.
MAY_INCLUDE = {
    "base": {"base"},
    "proto": {"base", "proto"},
    "discovery": {"base", "proto", "discovery"},
    "transport": {"base", "proto", "transport"},
    "planner": {"base", "proto", "planner"},
    "runtime": {"base", "runtime"},
    "agent": {"base", "proto", "discovery", "transport", "planner", "runtime", "agent"},
}
LINES_MAX = 1000
# Files of one system by their names; the only places where a system's macro may decide.
PER_SYSTEM = re.compile(r"_(linux|macos|x86|arm64)\.[ch]$")
# A line or two each, inside a function that is otherwise the same everywhere.
SMALL_DIFFERENCE = {"discovery/mdns_child.c", "runtime/pool.c"}
SYSTEM_MACRO = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif).*\b(__APPLE__|__MACH__|__linux__|__linux|_WIN32)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def tracked():
    out = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if out.returncode == 0 and out.stdout:
        return [f for f in out.stdout.split("\n") if f]
    found = []
    for folder, folders, files in os.walk(ROOT):  # an unpacked archive, without git
        folders[:] = [f for f in folders if not f.startswith((".", "build"))]
        found += [os.path.relpath(os.path.join(folder, f), ROOT) for f in files]
    return found


def check_file(name, breaches):
    room = name.split("/")[0]
    with open(os.path.join(ROOT, name), encoding="utf-8", errors="replace") as f:
        lines = f.read().split("\n")
    if len(lines) - 1 > LINES_MAX:
        breaches.append(f"{name}:1: {len(lines) - 1} lines; a file over {LINES_MAX:,} wants to be two")
    for i, line in enumerate(lines, 1):
        include = INCLUDE.match(line)
        if include and room in MAY_INCLUDE:
            target = include.group(1).split("/")[0]
            if "/" in include.group(1) and target not in MAY_INCLUDE[room]:
                breaches.append(f"{name}:{i}: {room} may not know {target}")
            elif "/" not in include.group(1) and not include.group(1).endswith(".pb-c.h"):
                breaches.append(f"{name}:{i}: includes are written \"folder/module.h\"")
        if room in MAY_INCLUDE and SYSTEM_MACRO.match(line) and not PER_SYSTEM.search(name) and \
                name not in SMALL_DIFFERENCE:
            breaches.append(f"{name}:{i}: what a system does differently stands in a file of its own")


def main():
    breaches = []
    n = 0
    for name in tracked():
        if name.endswith((".c", ".h")):
            n += 1
            check_file(name, breaches)
    for b in breaches:
        print(b)
    print(f"{n} files looked at, {len(breaches)} breaches")
    return 1 if breaches or n == 0 else 0


sys.exit(main())
