"""Doubles of programs that cannot be had here: Shifter, Singularity, podman-hpc.

Each takes the options that the real program takes, refuses others and unknown images in its words and with its exit
codes, appends a JSON line with arguments, variables and directory to ``$SHIM_LOG``, and really runs the command in the
directory ``$SHIM_IMAGES/NAME`` through bubblewrap. They prove that a command line is one that the program takes; they
prove nothing about what the real program does with it.
"""
