// A step for one device gets a mesh, and a division of each argument and result.

// RUN: stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --passes '' -o %t.mlir | filecheck %s
// CHECK: plan.mlir for 8 x NVIDIA H100
// CHECK-NEXT: mesh data 8
// CHECK-NEXT: time {{.*}}, by the model, as written
// CHECK-NEXT: peak
// CHECK-NEXT: gap at most {{.*}} % to the best division
// CHECK: argument type a device division another
// CHECK-NEXT: weight tensor<8192x8192xf32> 32.0 MiB P(None, 'data')
// CHECK-NEXT: batch tensor<65536x8192xf32> 2.00 GiB P() P('data'): +{{.*}} ms, -1.75 GiB

// RUN: filecheck %s --check-prefix=OUT < %t.mlir
// OUT: mhlo.num_partitions = 8 : i32
// OUT: sdy.mesh @mesh = <["data"=8]>
// OUT: %arg0: tensor<8192x8192xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>}

// The plan and its partitioned form compute the same as the step on one device.
// RUN: sed 's/8192/16/g; s/65536/32/g' %s > %t.small.mlir
// RUN: stablehlo-tools plan --budget 0 %t.small.mlir --hardware h100 --devices 4 --axes data=2,model=2 --keep "batch=P('data')" --keep "weight=P(None, 'model')" -o %t.planned.mlir | filecheck %s --check-prefix=KEPT
// KEPT: mesh data 2 x model 2
// KEPT: weight tensor<16x16xf32> 512 B P(None, 'model')
// KEPT-NEXT: batch tensor<32x16xf32> 1.00 KiB P('data')
// KEPT: 1 plan in
// RUN: stablehlo-tools verify %t.small.mlir %t.planned.mlir | filecheck %s --check-prefix=SAME
// SAME: identical in exact arithmetic

// RUN: stablehlo-tools plan --budget 0 %t.small.mlir --hardware h100 --devices 4 --report %t.html > %t.txt
// RUN: filecheck %s --check-prefix=PAGE < %t.html
// PAGE: planned for 4 devices
// PAGE: weight

// Shardings that the export has stay, and the rest is chosen; a plan can be made anew.
// RUN: stablehlo-tools plan --budget 0 %t.small.mlir --hardware h100 --devices 4 --axes data=2,model=2 --keep "batch=P('data')" --passes '' -o %t.some.mlir > %t.txt
// RUN: sed 's/%arg0: tensor<16x16xf32> {[^}]*{}]>}/%arg0: tensor<16x16xf32>/' %t.some.mlir > %t.batch.mlir
// RUN: stablehlo-tools plan --budget 0 %t.batch.mlir --hardware h100 --devices 4 | filecheck %s --check-prefix=STATED
// STATED: mesh data 2 x model 2
// STATED: argument 1 tensor<32x16xf32> 1.00 KiB P('data')
// RUN: not stablehlo-tools plan --budget 0 %t.some.mlir --hardware h100 --devices 2 2>&1 | filecheck %s --check-prefix=AGAIN
// AGAIN: {{.*}}.some.mlir: error: the program is for 4 devices already: plan needs a step that was exported for one, or for 2
// AGAIN-NEXT: try: stablehlo-tools plan {{.*}} --replan
// RUN: stablehlo-tools plan --budget 0 %t.some.mlir --hardware h100 --devices 2 --replan | filecheck %s --check-prefix=REPLANNED
// REPLANNED: mesh data 2
// RUN: not stablehlo-tools plan --budget 0 %t.planned.mlir --hardware h100 --devices 4 2>&1 | filecheck %s --check-prefix=LOCAL
// LOCAL: error: the program has manual computations or collectives: it keeps its mesh

// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --pipeline always 2>&1 | filecheck %s --check-prefix=LAYERS
// LAYERS: error: no pipeline was found: it needs a lax.scan over stacked weights
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --ranks %t.ranks 2>&1 | filecheck %s --check-prefix=RANKS
// RANKS: error: --ranks needs a pipeline
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --optimize 2>&1 | filecheck %s --check-prefix=COMPILER
// COMPILER: error: --optimize needs a compiler, and a budget for it

// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --axes data=2,model=2 2>&1 | filecheck %s --check-prefix=PRODUCT
// PRODUCT: error: the axes data 2 x model 2 have 4 devices, not 8
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 1 2>&1 | filecheck %s --check-prefix=ONE
// ONE: error: a step on one device needs no plan: give two devices or more
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --axes data=8 --keep "batsch=P('data')" 2>&1 | filecheck %s --check-prefix=PATH
// PATH: error: no argument is called 'batsch'; they are: weight, batch
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 8 --axes data=8 --keep "batch=P('dta')" 2>&1 | filecheck %s --check-prefix=AXIS
// AXIS: error: --keep batch=P('dta'): no axis is called 'dta'; axes: data

// If nothing fits, the exit code is 1, and nothing is written.
// RUN: rm -f %t.none.mlir
// RUN: not stablehlo-tools plan --budget 0 %s --hardware h100 --devices 2 --memory-limit 0.1 -o %t.none.mlir | filecheck %s --check-prefix=NONE
// NONE: no plan for 2 devices fits: the least memory found is {{.*}} a device, and the limit is 102 MiB
// RUN: not test -e %t.none.mlir

module @step {
  func.func @main(%weight: tensor<8192x8192xf32> loc("weight"), %batch: tensor<65536x8192xf32> loc("batch"))
      -> (tensor<8192x8192xf32>, tensor<f32>) {
    %product = stablehlo.dot_general %batch, %weight, contracting_dims = [1] x [0]
        : (tensor<65536x8192xf32>, tensor<8192x8192xf32>) -> tensor<65536x8192xf32>
    %tanh = stablehlo.tanh %product : tensor<65536x8192xf32>
    %gradient = stablehlo.dot_general %batch, %tanh, contracting_dims = [0] x [0]
        : (tensor<65536x8192xf32>, tensor<65536x8192xf32>) -> tensor<8192x8192xf32>
    %new = stablehlo.subtract %weight, %gradient : tensor<8192x8192xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %loss = stablehlo.reduce(%tanh init: %zero) applies stablehlo.add across dimensions = [0, 1]
        : (tensor<65536x8192xf32>, tensor<f32>) -> tensor<f32>
    return %new, %loss : tensor<8192x8192xf32>, tensor<f32>
  }
}
