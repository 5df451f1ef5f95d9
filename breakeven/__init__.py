"""When does disaggregation pay? See README.md."""
