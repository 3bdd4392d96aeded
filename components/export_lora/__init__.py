"""The stage `export_lora` as a KFP component."""
