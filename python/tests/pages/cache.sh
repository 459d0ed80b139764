# instead of --device sm_90a -> --device sm_90a --device cpu
# instead of /opt/kernels.flcepack -> kernels.flcepack
python "$PAGES/files.py"
