# mypy: ignore-errors
"""Numbered, sealed records in a file beside this one: put in front of the plugins that write them.

The key is read and removed before the code under test is loaded, and what writing needs is kept hold of, so that code
which replaces `open` or `print` later changes nothing. Works from Python 3.5 on.
"""

import hashlib
import hmac
import json
import os


def open_records(
    key_file,
    records_file,
    write=os.write,
    dumps=json.dumps,
    seal=hmac.new,
    digest=hashlib.sha256,
    getpid=os.getpid,
):
    """A function that writes one record of its keyword arguments; None in all processes but the first."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        with open(os.path.join(folder, key_file), "rb") as file:
            key = bytes.fromhex(file.read().decode("ascii"))
        os.unlink(os.path.join(folder, key_file))
    except (OSError, ValueError):  # a process that was started by the tests: only the first one reports
        return None
    out = os.open(os.path.join(folder, records_file), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    number = [0]
    owner = getpid()

    def record(**fields):
        if getpid() != owner:  # a fork of the tests
            return
        fields["n"] = number[0]
        number[0] += 1
        body = dumps(fields, sort_keys=True).encode("ascii")
        write(out, seal(key, body, digest).hexdigest().encode("ascii") + b" " + body + b"\n")

    return record
