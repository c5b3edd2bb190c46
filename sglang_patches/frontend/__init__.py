"""The host's half of `kvedit.lang`, in the process of the program.

Called by: `kvedit.lang`.
May touch: it uses the client and the request options; it knows no server of this process.
"""
