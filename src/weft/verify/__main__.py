"""`python -m weft.verify request.json`: one launched rank of a verification."""

from weft.core.quiet import quiet_libraries

quiet_libraries()  # before the first import of a library that prints while it is imported

from weft.verify.worker import main  # noqa: E402

main()
