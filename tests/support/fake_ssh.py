"""Stands in for ssh: takes its words and runs the remote command here, so that hosts need neither sshd nor root."""

import os
import sys

words = sys.argv[1:]
while words and words[0].startswith("-"):
    words = words[2:] if words[0] == "-o" else words[1:]
host, command = words
if host.startswith("unknown"):
    print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
    sys.exit(255)
os.execvp("sh", ["sh", "-c", command])
