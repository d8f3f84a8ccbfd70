"""What runs inside a sandbox: zygote, supervisor and interpreter. Standard library only.

This folder is bound read-only into the sandbox and imported there as the package `inside`; nothing in it may
import anything of the project outside this folder.
"""
