#!/bin/sh
# Compiles the kernels here to PTX with nvcc 13.0; the texts are kept, since most machines have no nvcc.
cd "$(dirname "$0")" || exit 1
for name in basic shared tensor; do nvcc -ptx -std=c++17 -arch=sm_80 $name.cu -o $name.ptx || exit 1; done
nvcc -ptx -std=c++17 -gencode arch=compute_90a,code=compute_90a hopper.cu -o hopper.ptx
