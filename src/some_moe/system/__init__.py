"""Where the program meets the machine and other people's files. Imports no torch.

`files` and `staging` write whole or not at all; `reading`, `records` and `forms` believe nothing that they read;
`processes` and `workers` keep others out and run nothing but what is installed; `cache` and `progress` serve whoever
waits.
"""
