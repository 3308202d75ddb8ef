#!/usr/bin/env python3
"""Plants a fault: copies a source file with one piece of text replaced (planted.list), or ends with an
error where the text is not there exactly once, so that the list cannot fall behind the code."""
import pathlib
import sys


def planted(list_file, name):
    for block in pathlib.Path(list_file).read_text().split("\n=== ")[1:]:
        head, _, rest = block.partition("\n")
        if head.split()[0] == name:
            old, _, new = rest.partition("\n--- with\n")
            return old.removeprefix("--- replace\n"), new.rstrip("\n")
    sys.exit(f"{list_file}: no fault {name}")


def main():
    list_file, name, source, to = sys.argv[1:]
    old, new = planted(list_file, name)
    text = pathlib.Path(source).read_text()
    if text.count(old) != 1:
        sys.exit(f"{name}: its text is {text.count(old)} times in {source}")
    pathlib.Path(to).write_text(text.replace(old, new))


main()
