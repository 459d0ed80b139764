# instead of D=5120,V=131072,dtype=bf16 -> D=64,V=500,dtype=bf16 --exhaustive 1
# instead of --num-tokens 4096 --num-tokens 8192 -> --num-tokens 8
# instead of --hf-config config.json -> --hf-config config.json --num-tokens 8 --exhaustive 1
# instead of --all-layers -> --spec D=64,V=500,dtype=bf16 --num-tokens 8 --exhaustive 1
# instead of D=2048,V=50257,dtype=fp32 --device cpu -> D=64,V=503,dtype=fp32 --device cpu --num-tokens 8 --exhaustive 1
python "$PAGES/files.py"
