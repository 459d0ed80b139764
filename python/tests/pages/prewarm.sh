# instead of --device h100 -> --device h100 --device cpu
python "$PAGES/files.py"
# %% Packs
flce prewarm --manifest kernels.json --out kernels.flcepack
