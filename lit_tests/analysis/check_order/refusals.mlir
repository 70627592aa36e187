// Programs that cannot be told apart, or compared: each refusal says where.

// Of one job, all programs state the same number of processes.
// RUN: sed 's/num_replicas = 2/num_replicas = 4/' %s > %t.four.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s %t.four.mlir | filecheck %s --check-prefix=NUMBER
// NUMBER: {{.*}}refusals.mlir: error: the program states 2 processes, and another program of the job 4: programs of one job state the same number (or give --separate, if each has devices of its own)
// RUN: stablehlo-tools check-order --target none --separate %s %s | filecheck %s --check-prefix=SEPARATE
// SEPARATE: ordered: 2 programs on devices 0 to 3, 2 collectives

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s %s %s | filecheck %s --check-prefix=PARTS
// PARTS: error: 3 programs do not divide 2 devices evenly: assign devices to each program with --devices

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s %s --devices 0 | filecheck %s --check-prefix=DEVICES
// DEVICES: error: --devices is given for 1 of 2 programs: give it for each program, in order
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s %s --devices 0 --devices 0 | filecheck %s --check-prefix=TWICE
// TWICE: error: device 0 is given to two programs, and programs that run one after the other on the same devices cannot be checked together: check each by itself
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s --devices 0-2 | filecheck %s --check-prefix=OUTSIDE
// OUTSIDE: error: device 2 is not among the program's 2 processes
// RUN: not stablehlo-tools check-order --target none %s --devices 1-x 2>&1 | filecheck %s --check-prefix=LIST
// LIST: '1-x' is not a list of devices such as 0-3,8
// RUN: not stablehlo-tools check-order --target none %s --devices 3-1 2>&1 | filecheck %s --check-prefix=EMPTY
// EMPTY: '3-1' names no device, or names one twice

// RUN: stablehlo-tools check-order --target none %s %s --devices 1 --devices 0 | filecheck %s --check-prefix=GIVEN
// GIVEN: ordered: 2 programs on devices 0 and 1, 2 collectives
// RUN: not stablehlo-tools check-order --target none %s --devices 1 > %t.out
// RUN: filecheck %s --check-prefix=MISSING < %t.out
// MISSING: mismatch: all_gather at {{.*}}refusals.mlir:{{.*}} waits for device 0, which runs none of the programs

// A symbolic shape is no obstacle within one program.
// RUN: sed 's/tensor<2xf32>/tensor<?xf32>/g; s/tensor<4xf32>/tensor<?xf32>/g' %s > %t.symbolic.mlir
// RUN: stablehlo-tools check-order --target none %t.symbolic.mlir | filecheck %s --check-prefix=ONE
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.symbolic.mlir %t.symbolic.mlir | filecheck %s --check-prefix=SYMBOLIC
// ONE: ordered: 1 program on devices 0 and 1, 1 collective
// SYMBOLIC: symbolic.mlir:{{[0-9]+:[0-9]+}}: error: all_gather tensor<?xf32> -> tensor<?xf32> all_gather_dim 0: a symbolic shape cannot be compared with another program's; export with concrete shapes

// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %s /nonexistent.mlir | filecheck %s --check-prefix=FILE
// FILE: /nonexistent.mlir: error: cannot read the file: No such file or directory
// RUN: echo 'module { func.func @other() { return } }' > %t.nomain.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.nomain.mlir | filecheck %s --check-prefix=MAIN
// MAIN: nomain.mlir:{{.*}}error: the module has no function @main

// Groups that name devices which there are not.
// RUN: sed 's/\[\[0, 1\]\]/[[0, 1, 2]]/; s/tensor<1x2xi64>/tensor<1x3xi64>/; s/tensor<4xf32>/tensor<6xf32>/g' %s > %t.groups.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.groups.mlir | filecheck %s --check-prefix=GROUPS
// GROUPS: groups.mlir:{{[0-9]+:[0-9]+}}: error: stablehlo.all_gather: {{.*}}2
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<4xf32> {
    %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<4xf32>
    return %g : tensor<4xf32>
  }
}
