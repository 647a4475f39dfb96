"""Catrap as a Game Boy cartridge: source, build, and the built image with its symbol addresses."""

from pathlib import Path

ROM = Path(__file__).with_name("catrap.gb")
SYMBOLS = Path(__file__).with_name("catrap.sym")


def addresses(symbols: Path = SYMBOLS) -> dict[str, int]:
    """Reads a .sym file: {name of a variable in game.c: its address}."""
    lines = (line.split() for line in symbols.read_text().splitlines())
    return {name: int(address.split(":")[1], 16) for address, name in lines}
