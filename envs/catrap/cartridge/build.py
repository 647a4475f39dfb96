"""Builds the cartridge from `game.c`, `crt0.s`, the tile art and the level files.

Needs SDCC (Debian: `apt-get install sdcc`); running the built image does not. Two builds are bit for
bit equal.

    python -m jaxreward.envs.catrap.cartridge.build [--check] [--out FILE] [--layout original]
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxreward.envs.catrap import art, levels
from jaxreward.envs.catrap.cartridge import ROM, SYMBOLS
from jaxreward.errors import JaxrewardError, SimulatorError

SDCC_VERSION = "4.2.0"  # built the packaged image; another version compiles to other bytes
ROM_SIZE = 0x8000
CODE_START = 0x0200
TITLE = b"JAXREWARD"
HEADER = slice(0x134, 0x14D)  # what the header checksum covers
HEADER_CHECKSUM, GLOBAL_CHECKSUM = 0x14D, slice(0x14E, 0x150)
LOGO = slice(0x104, 0x134)  # a trademark, which stays zero: emulators do not ask for it

# Where variables start. The original game keeps its grid in C100 .. C19F, so the stand-in for it must not.
DATA_START = {"catrap": 0xC000, "original": 0xC200}
SPRITE_BUFFER = 0xDE00  # fixed in game.c
HOST_SYMBOLS = (
    *("state", "level", "level_request", "monsters", "active", "num_cats", "fast", "position"),
    *("facing_left", "moves", "cells", "ram_level", "num_levels"),
)


def build(layout: str = "catrap") -> tuple[bytes, dict[str, int]]:
    """Compiles the cartridge.

    Args:
      layout: 'catrap', or 'original' for a stand-in that also shows its state in RAM where the
        commercial game does, to test what reads that game.

    Returns:
      The image of 32 KiB, and the addresses of the variables that the host reads.

    Raises:
      SimulatorError: SDCC is missing or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "assets.h").write_text(_assets())
        for source in ("game.c", "crt0.s"):
            shutil.copyfile(Path(__file__).with_name(source), work / source)
        define = ["-DORIGINAL_LAYOUT"] if layout == "original" else []
        _run(work, "sdasgb", "-o", "-s", "crt0.rel", "crt0.s")
        _run(
            *(work, "sdcc", "-msm83", "--std-c11", "--opt-code-speed", "--max-allocs-per-node", "3000"),
            *(*define, "-c", "game.c", "-o", "game.rel"),
        )
        _run(
            *(work, "sdcc", "-msm83", "--no-std-crt0", "--code-loc", hex(CODE_START)),
            *("--data-loc", hex(DATA_START[layout]), "crt0.rel", "game.rel", "-o", "game.ihx"),
        )
        image = _image((work / "game.ihx").read_text())
        addresses = _addresses((work / "game.map").read_text())
    highest = max(address for address in addresses.values() if address < 0xE000)
    if highest >= SPRITE_BUFFER:
        raise SimulatorError(f"a variable lies at {highest:04X}, within or above the sprite buffer")
    return image, {name: addresses[name] for name in HOST_SYMBOLS}


def symbol_file(addresses: dict[str, int]) -> str:
    """The text of a .sym file: bank, address and name a line, by address."""
    by_address = sorted(addresses.items(), key=lambda item: item[1])
    return "".join(f"00:{address:04X} {name}\n" for name, address in by_address)


def installed_sdcc() -> str:
    """The version of SDCC on this machine; raises SimulatorError if there is none."""
    found = re.search(r"\d+\.\d+\.\d+", _run(Path.cwd(), "sdcc", "--version"))
    return found.group() if found else "of an unknown version"


def _run(folder: Path, *command: str) -> str:
    """Runs a tool in a folder and returns what it printed."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise SimulatorError(
            f"{command[0]} was not found: building the cartridge needs SDCC (Debian: apt-get install sdcc)"
        ) from None
    if done.returncode:
        raise SimulatorError(f"'{' '.join(command)}' failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _assets() -> str:
    """The C header of everything that the game shares with the JAX environment."""
    names = ("EMPTY", "WALL", "SAND", "LADDER", "BOULDER", "WALKER", "FLYER", "CAT", "ROWS", "COLUMNS")
    names += ("BACKGROUND_PALETTE", "ACTIVE_PALETTE", "INACTIVE_PALETTE")
    pictures = list(art.ART)
    all_levels = [level.cells for level in levels.all_levels()]
    constants = {name: getattr(art, name) for name in names} | {
        "PICTURE_CAT": pictures.index("cat"),
        "PICTURE_CAT_ON_LADDER": pictures.index("cat_on_ladder"),
        "NUM_LEVELS": len(all_levels),
    }
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    lines.append(_c_array("tiles", _tile_bytes()))
    lines.append(_c_array("levels", np.asarray(all_levels, np.uint8).tobytes()))
    return "\n".join(lines)


def _tile_bytes() -> bytes:
    """The hardware's form of `art.TILES`: four 8 x 8 tiles a picture, two bit planes a row."""
    quarters = art.TILES.reshape(-1, 2, 8, 2, 8).transpose(0, 1, 3, 2, 4)
    planes = np.stack([quarters & 1, quarters >> 1], axis=-2)
    return np.packbits(planes, axis=-1).tobytes()


def _c_array(name: str, data: bytes) -> str:
    rows = [", ".join(map(str, data[i : i + 20])) for i in range(0, len(data), 20)]
    return f"static const uint8_t {name}[{len(data)}] = {{\n  " + ",\n  ".join(rows) + "};\n"


def _image(intel_hex: str) -> bytes:
    """Turns the linker's output into an image with a valid header and an empty logo area."""
    rom = bytearray(ROM_SIZE)
    for line in intel_hex.split():
        record = bytes.fromhex(line[1:])
        length, address, kind = record[0], int.from_bytes(record[1:3], "big"), record[3]
        if kind == 0:
            if address + length > ROM_SIZE:
                raise SimulatorError(
                    f"the game reaches {address + length:#x}; a cartridge ends at {ROM_SIZE:#x}"
                )
            rom[address : address + length] = record[4 : 4 + length]
    rom[HEADER] = TITLE.ljust(HEADER.stop - HEADER.start, b"\0")
    rom[LOGO] = bytes(LOGO.stop - LOGO.start)
    rom[0x14A] = 1  # sold outside Japan; the zeros before it say: no mapper, 32 KiB, no RAM
    rom[HEADER_CHECKSUM] = -(sum(rom[HEADER]) + HEADER.stop - HEADER.start) & 0xFF
    rom[GLOBAL_CHECKSUM] = (sum(rom) & 0xFFFF).to_bytes(2, "big")  # both of its bytes are still zero
    return bytes(rom)


def _addresses(linker_map: str) -> dict[str, int]:
    """The addresses of all C globals."""
    found = re.findall(r"^\s+([0-9A-F]{8})\s+_(\w+)\s", linker_map, re.MULTILINE)
    return {name: int(address, 16) for address, name in found}


def check() -> str:
    """Rebuilds the cartridge and compares it with the one in the package.

    Returns:
      One line that says they are equal.

    Raises:
      SimulatorError: they differ.
    """
    image, addresses = build()
    found, rebuilt = (hashlib.sha256(data).hexdigest() for data in (ROM.read_bytes(), image))
    if found != rebuilt or SYMBOLS.read_text() != symbol_file(addresses):
        raise SimulatorError(
            f"{ROM.name} or {SYMBOLS.name} is not what its sources build: SHA-256 {found}, rebuilt "
            f"{rebuilt} (with SDCC {installed_sdcc()}, expected {SDCC_VERSION}). "
            "Run 'python -m jaxreward.envs.catrap.cartridge.build' and commit both files"
        )
    return f"{ROM.name} equals a rebuild: SHA-256 {rebuilt}"


def main() -> None:
    """Builds or checks the cartridge; exits with 2 if that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROM, help="where to write the image (and a .sym beside it)"
    )
    parser.add_argument("--check", action="store_true", help="only compare the packaged image with a rebuild")
    parser.add_argument("--layout", choices=sorted(DATA_START), default="catrap")
    arguments = parser.parse_args()
    if arguments.layout == "original" and arguments.out == ROM:
        parser.error("--layout original is a stand-in for tests: give it its own --out")
    try:
        if arguments.check:
            print(check())
            return
        image, addresses = build(arguments.layout)
    except JaxrewardError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    arguments.out.write_bytes(image)
    arguments.out.with_suffix(".sym").write_text(symbol_file(addresses))
    used = len(image.rstrip(b"\0"))
    print(f"{arguments.out}: {used} of {ROM_SIZE} bytes used, SHA-256 {hashlib.sha256(image).hexdigest()}")


if __name__ == "__main__":
    main()
