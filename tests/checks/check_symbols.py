"""No two rooms define the same global symbol: the linker takes the first from static archives without a word, and the
program then calls the wrong one.

usage: check_symbols.py BUILD_FOLDER      exit code 1 when a name is defined twice
"""
import collections
import glob
import os
import subprocess
import sys

build = sys.argv[1]
rooms = ["base", "proto", "discovery", "transport", "planner", "runtime", "agent"]
where = collections.defaultdict(set)
n_archives = 0
for room in rooms:
    for archive in glob.glob(os.path.join(build, room, "**", "*.a"), recursive=True):
        n_archives += 1
        out = subprocess.run(["nm", "--defined-only", "--extern-only", archive], capture_output=True, text=True, check=True)
        for line in out.stdout.split("\n"):
            words = line.split()
            # T text, D data, B bss, R read-only, C common; weak ones are the compiler's own
            if len(words) == 3 and words[1] in "TDBRC" and not words[2].startswith("__"):
                where[words[2]].add(room)
twice = {name: found for name, found in where.items() if len(found) > 1}
for name, found in sorted(twice.items()):
    print(f"{name} is defined in {' and in '.join(sorted(found))}")
print(f"{len(where)} global symbols in {n_archives} archives, {len(twice)} defined in two rooms")
sys.exit(1 if twice or n_archives < len(rooms) else 0)
