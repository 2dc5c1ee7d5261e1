"""Checkpoints on disk: complete or absent, checked when they are read, and loadable without Tutti.

A run's folder holds one folder per checkpoint, and a pointer for people and other programs:

    RUN/
      latest.json               {"checkpoint": "step-00000123"}
      .lock                     the process that writes into this folder
      step-00000123/
        model.safetensors       the model, by its own names
        optimizer.safetensors   the tensors of the optimiser's state
        state.safetensors       the tensors of everything else
        checkpoint.json         the index: all other values, and the size and SHA-256 of each file

    tree          nested Python values as JSON and tensors, and back
    tensor_files  files of tensors in the safetensors format
    index         the index file, the list of checkpoints, and their verification; imports no torch
    durable       files and folders that survive a crash
    run_lock      one writer per folder
    file_system   the kind of file system that a folder is on
    copies        copies of nested values, made before the next step
    snapshots     snapshots in memory: as they are given, copied, and encoded
    storage       snapshots: write and read
    parallel      several files at once
    background    writing beside training
    interval      how often to write
"""
