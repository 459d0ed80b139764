#include "cli/command.hpp"

int main(int argc, char** argv) { return flce::cli::main(argc, argv); }
