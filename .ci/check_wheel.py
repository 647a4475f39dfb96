"""Checks that a wheel holds exactly the package's files, below the single name jaxreward."""

import subprocess
import sys
import zipfile

FOLDERS = {"jaxreward": "", "agents": "agents/", "envs": "envs/", "checkpoints": "checkpoints/"}


def expected_files() -> set[str]:
    """The tracked files of the four packages, by the names that they have in a wheel."""
    tracked = subprocess.run(["git", "ls-files", "-z", *FOLDERS], check=True, capture_output=True, text=True)
    names = set()
    for path in tracked.stdout.split("\0")[:-1]:
        folder, _, rest = path.partition("/")
        names.add(f"jaxreward/{FOLDERS[folder]}{rest}")
    return names


def main() -> None:
    """Compares; exits with a message when something is missing or too much."""
    for path in sys.argv[1:]:
        with zipfile.ZipFile(path) as wheel:
            found = {name for name in wheel.namelist() if not name.endswith("/")}
        found = {name for name in found if not name.split("/")[0].endswith(".dist-info")}
        expected = expected_files()
        missing, extra = sorted(expected - found), sorted(found - expected)
        if missing or extra:
            sys.exit(f"{path}: missing {missing}, not expected {extra}")
        print(f"the wheel holds the {len(found)} files of jaxreward and nothing else")


if __name__ == "__main__":
    main()
