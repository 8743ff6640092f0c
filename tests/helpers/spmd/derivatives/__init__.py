"""Programs and features of which tests take derivatives, on one device and on meshes."""
