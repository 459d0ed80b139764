# instead of python -m flce.bench -> python -m flce.bench --rounds 3 --no-memory
# instead of torch,compile,liger -> torch,liger
# instead of --num-tokens 8192 --hidden-size 4096 --vocab-size 128256 -> --num-tokens 16 --hidden-size 64 --vocab-size 500
# instead of --num-tokens 1024,4096,16384 -> --num-tokens 16,32 --compare torch --flce default
# instead of D=2048,V=151936,dtype=bf16 -> D=64,V=500,dtype=bf16 --num-tokens 16 --compare torch
python "$PAGES/files.py"
