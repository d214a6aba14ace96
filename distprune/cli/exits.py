"""How a command ends: exit codes that scripts can rely on.

torchrun ends with 1 whatever its workers end with; the code is in the report as well.
"""

OK = 0
INTERNAL = 1  # a defect of distprune
USAGE = 2  # the command, or the recipe
INPUT = 3  # the checkpoint, or a text
OUTPUT = 4  # the disk, or what is on it already
DISTRIBUTED = 5  # ranks that differ, or are lost
DIFFERENT = 6  # `diff --exit-code`: not the 1 of git, which would look like a defect
MACHINE = 7  # memory, open files, processes
INTERRUPTED = 130  # SIGINT
TERMINATED = 143  # SIGTERM
READER_GONE = 141  # nobody reads stdout any more, as after `| head`; SIGPIPE
