"""What people have said, in rows that leave nothing behind when they are deleted.

SQLite's `secure_delete` writes zeros over deleted rows and freed pages, but not over the copy that stays in the unused
part of a page when a row moves to another page while the tree is balanced. Only the beginning of a row (its local part)
lies in such pages; the rest is in overflow pages, which belong to one row and are zeroed with it. So each row here
begins with padding that fills the local part, and no byte of the text is ever in a page that it could be left in.

https://www.sqlite.org/fileformat2.html, "Cell payload overflow pages" has the arithmetic.
"""

from __future__ import annotations

import sqlite3

SCHEMA = "CREATE TABLE IF NOT EXISTS texts (number INTEGER PRIMARY KEY, pad BLOB NOT NULL, data BLOB NOT NULL);"


def padding(size: int, page: int = 4096) -> int:
    """How many bytes of padding keep the local part of a row with `size` bytes of text free of them.

    `page`: usable bytes of a page, 1024 to 8192 (where the header takes two bytes to say how long the padding is).
    """
    header = 1 + 1 + 2 + _varint(2 * size + 12)  # its own length, a NULL for the number, the types of `pad` and `data`
    least, most = (page - 12) * 32 // 255 - 23, page - 35
    pad = max(least, most + 1 - header - size)  # from here on the row has overflow pages
    local = least + (header + pad + size - least) % (page - 4)
    if local > most or local <= header + pad:
        return pad
    return pad + most + 1 - local  # so long that SQLite keeps no more than `least` bytes in the page


def _varint(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def put(sql: sqlite3.Connection, data: bytes, number: int | None = None) -> int:
    """Keep `data` in row `number` (None: a new one), whatever was there before; the number."""
    page = int(sql.execute("PRAGMA page_size").fetchone()[0])
    pad = padding(len(data), page)
    # zeroblob would be cheaper, but SQLite expands it as soon as anything follows it in the row.
    made = sql.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", (number, bytes(pad), data))
    assert made.lastrowid is not None
    return made.lastrowid


def read(sql: sqlite3.Connection, number: int | None) -> bytes:
    """What row `number` holds; b"" if it is gone, or was never there."""
    row = None if number is None else sql.execute("SELECT data FROM texts WHERE number = ?", (number,)).fetchone()
    return b"" if row is None else bytes(row[0])


def drop(sql: sqlite3.Connection, number: int | None) -> None:
    """Delete row `number`."""
    sql.execute("DELETE FROM texts WHERE number = ?", (number,))
