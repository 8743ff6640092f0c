"""`fs.partition`, `fs.apply` and `fs.auto`: functions of one device laid out on a mesh."""
